#!lua flags=no-writes
return redis.call('ZRANGEBYSCORE', KEY.retained, '-inf', instant(now), 'LIMIT', 0, ARGV[1])
