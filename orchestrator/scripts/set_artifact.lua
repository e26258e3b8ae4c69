#!lua flags=allow-oom
local session_id, id, artifact = unpack(ARGV, 1, 3)
local files = key('files', session_id)
local file = redis.call('HGET', files, id)
if not file then return {'file_missing'} end
local created_at, bytes, source, path =
  string.match(file, '^([^%z]*)%z([^%z]*)%z([^%z]*)%z[^%z]*%z(.*)$')
redis.call('HSET', files, id, table.concat({created_at, bytes, source, artifact, path}, '\0'))
redis.call('SADD', key('artifacts', session_id), artifact)
expire_with_session(session_id, 'artifacts')
return {'ok'}
