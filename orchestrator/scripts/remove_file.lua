#!lua flags=allow-oom
local session_id, id = ARGV[1], ARGV[2]
local files, order = key('files', session_id), key('file_order', session_id)
local file = redis.call('HGET', files, id)
if not file then return false end
redis.call('HDEL', files, id)
redis.call('HDEL', key('paths', session_id), string.match(file, '[^%z]*$'))
local position = redis.call('ZSCORE', order, id)
redis.call('ZREM', order, id)
remember_position(key('file_cursors', session_id), id, position)
return file
