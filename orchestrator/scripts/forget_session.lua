#!lua flags=allow-oom
local id = ARGV[1]
redis.call('ZREM', KEY.deadlines, id)
redis.call('ZREM', KEY.retained, id)
local artifacts = redis.call('SMEMBERS', key('artifacts', id))

local session = read_session(id)
if session then
  local tenant_sessions = key('tenant_sessions', session[F.tenant])
  local position = redis.call('ZSCORE', tenant_sessions, id)
  if position then
    redis.call('ZREM', tenant_sessions, id)
    remember_position(key('tenant_cursors', session[F.tenant]), id, position)
  end
  redis.call('SREM', key('tenant_running', session[F.tenant]), id)
  redis.call('SREM', key('worker_sessions', session[F.worker_id]), id)
end
for _, execution in ipairs(redis.call('ZRANGE', key('execution_order', id), 0, -1)) do
  redis.call('UNLINK', key('log', execution))
end
for _, name in ipairs({'session', 'executions', 'execution_order', 'unfinished', 'idempotency',
    'files', 'file_order', 'paths', 'file_cursors', 'artifacts'}) do
  redis.call('UNLINK', key(name, id))
end
return artifacts
