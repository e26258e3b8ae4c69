#!lua flags=allow-oom
local session_id, id, record, artifact = unpack(ARGV, 1, 4)
local executions = key('executions', session_id)
local stored = redis.call('HGET', executions, id)
if not stored then return {'execution_missing'} end
if finished(stored) then return {'finished', stored} end

redis.call('HSET', executions, id, record)
redis.call('ZREM', key('unfinished', session_id), id)
if artifact ~= '' then
  redis.call('SADD', key('artifacts', session_id), artifact)
  expire_with_session(session_id, 'artifacts')
end
local session = read_session(session_id)
if session and running(session) then touch(session_id, session) end
return {'ok', instant(now)}
