#!lua flags=allow-oom
-- Looks at no more than LIFE.scan ids per call, so that a filter that finds little does not keep
-- Redis busy; the last element of the reply is where to go on, false at the end.
local tenant, after, limit, direction, name, from = unpack(ARGV, 1, 6)
limit = tonumber(limit)
local order = key('tenant_sessions', tenant)
local bound
if from ~= '' then
  bound = '(' .. from
elseif after ~= '' then
  local position = redis.call('ZSCORE', order, after)
    or redis.call('ZSCORE', key('tenant_cursors', tenant), after)
  if not position then return {'unknown_cursor'} end
  bound = '(' .. position
end

local found, seen = {}, 0
while #found <= limit and seen < LIFE.scan do
  local step = math.min(LIFE.scan - seen, limit + 1)
  if name ~= '' then step = math.min(LIFE.scan - seen, 100) end
  local ids
  if direction == 'asc' then
    ids = redis.call('ZRANGEBYSCORE', order, bound or '-inf', '+inf', 'WITHSCORES',
      'LIMIT', 0, step)
  else
    ids = redis.call('ZREVRANGEBYSCORE', order, bound or '+inf', '-inf', 'WITHSCORES',
      'LIMIT', 0, step)
  end
  if #ids == 0 then return {'ok', found, false} end
  for i = 1, #ids, 2 do
    bound = '(' .. ids[i + 1]
    seen = seen + 1
    local session = read_session(ids[i])
    if not session then
      redis.call('ZREM', order, ids[i])
    elseif name == '' or session[F.name] == string.sub(name, 2) then
      found[#found + 1] = {ids[i], session}
      if #found > limit then break end
    end
  end
end
return {'ok', found, string.sub(bound, 2)}
