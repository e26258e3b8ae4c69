#!lua flags=no-writes
local id = redis.call('HGET', key('paths', ARGV[1]), ARGV[2])
if not id then return false end
return {id, redis.call('HGET', key('files', ARGV[1]), id)}
