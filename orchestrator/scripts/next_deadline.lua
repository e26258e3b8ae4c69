#!lua flags=no-writes
local due = redis.call('ZRANGE', KEY.deadlines, 0, 0, 'WITHSCORES')[2]
if not due then return false end
return instant(tonumber(due) - now)
