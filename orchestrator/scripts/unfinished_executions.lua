#!lua flags=no-writes
local session_id = ARGV[1]
local order, executions = key('execution_order', session_id), key('executions', session_id)
local places = {}
for _, id in ipairs(redis.call('ZRANGE', key('unfinished', session_id), 0, -1)) do
  local position = redis.call('ZSCORE', order, id)
  if position then places[#places + 1] = {tonumber(position), id} end
end
table.sort(places, function(a, b) return a[1] < b[1] end)
local found = {}
for _, place in ipairs(places) do
  found[#found + 1] = redis.call('HGET', executions, place[2])
end
return found
