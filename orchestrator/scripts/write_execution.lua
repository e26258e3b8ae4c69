#!lua flags=allow-oom
-- A state of an execution that is not its last. With a hold it starts: that needs a live session.
local session_id, id, record, artifact, hold = unpack(ARGV, 1, 5)
local executions = key('executions', session_id)
local stored = redis.call('HGET', executions, id)
if not stored then return {'execution_missing'} end
if finished(stored) then return {'finished', stored} end

if hold ~= '' then
  local session = read_session(session_id)
  if not session or not running(session) then return {'session_expired'} end
  redis.call('ZADD', key('unfinished', session_id), instant(now + tonumber(hold)), id)
  set_deadline(session_id, session)
end
redis.call('HSET', executions, id, record)
if artifact ~= '' then
  redis.call('SADD', key('artifacts', session_id), artifact)
  expire_with_session(session_id, 'artifacts')
end
return {'ok', instant(now)}
