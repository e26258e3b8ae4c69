#!lua flags=allow-oom
local id, reason, epoch, call, retention = unpack(ARGV, 1, 5)
local session = read_session(id)
if not session then return {'missing'} end
if not running(session) then
  -- The same call again, after its first reply was lost, has ended it all the same.
  if redis.call('HGET', key('session', id), 'ended_by') == call then return {'ok', session} end
  return {'missing'}
end
if session[F.epoch] ~= epoch then return {'missing'} end

redis.call('HSET', key('session', id),
  'status', 'expired', 'ended_at', instant(now), 'end_reason', reason, 'ended_by', call)
redis.call('ZREM', KEY.deadlines, id)
redis.call('SREM', key('tenant_running', session[F.tenant]), id)
redis.call('SREM', key('worker_sessions', session[F.worker_id]), id)
redis.call('ZADD', KEY.retained, instant(now + tonumber(retention)), id)
for _, execution in ipairs(redis.call('ZRANGE', key('execution_order', id), 0, -1)) do
  redis.call('EXPIRE', key('log', execution), LIFE.log)
end
redis.call('PEXPIRE', key('session', id),
  string.format('%.0f', (tonumber(retention) + LIFE.grace) * 1000))
expire_with_session(id, 'executions', 'execution_order', 'unfinished', 'idempotency', 'files',
  'file_order', 'paths', 'artifacts')
return {'ok', read_session(id)}
