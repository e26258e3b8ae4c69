#!lua flags=allow-oom
-- The records of an ended session are in the artifact store now; their keys go.
local session_id, artifact = ARGV[1], ARGV[2]
local session = read_session(session_id)
if not session or running(session) then return {'refused'} end
if redis.call('ZCARD', key('unfinished', session_id)) > 0 then return {'refused'} end
local archive = redis.call('HGET', key('session', session_id), 'archive')
if archive then return {archive == artifact and 'ok' or 'refused'} end

redis.call('HSET', key('session', session_id), 'archive', artifact)
redis.call('SADD', key('artifacts', session_id), artifact)
expire_with_session(session_id, 'artifacts')
redis.call('UNLINK', key('executions', session_id), key('execution_order', session_id))
return {'ok'}
