#!lua
local session_id, id, tenant, record, artifact = unpack(ARGV, 1, 5)
local idempotency_key, digest, hold, queue_limit = unpack(ARGV, 6, 9)

local session = read_session(session_id)
if not session or session[F.tenant] ~= tenant then return {'session_missing'} end

local executions = key('executions', session_id)
local idempotency = key('idempotency', session_id)
if idempotency_key ~= '' then
  local known = redis.call('HGET', idempotency, idempotency_key)
  if known then
    local at, known_digest, known_id = string.match(known, '^(%S+) (%S*) (%S+)$')
    if now - tonumber(at) < LIFE.idempotency then
      local existing = redis.call('HGET', executions, known_id)
      if known_id == id then return {'created', instant(now)} end
      if known_digest ~= digest then return {'key_reused'} end
      if existing then return {'known', existing} end
      if not running(session) then return {'archived', known_id} end
    end
  end
end
if redis.call('HEXISTS', executions, id) == 1 then return {'created', instant(now)} end

local expires_at = tonumber(session[F.expires_at])
if not running(session) or (expires_at and expires_at <= now) then return {'session_expired'} end
local unfinished = key('unfinished', session_id)
-- One of the unfinished runs; the others wait.
if redis.call('ZCARD', unfinished) > tonumber(queue_limit) then return {'queue_full'} end

redis.call('HSET', executions, id, record)
local order = key('execution_order', session_id)
redis.call('ZADD', order, next_position(order), id)
redis.call('ZADD', unfinished, instant(now + tonumber(hold)), id)
if artifact ~= '' then redis.call('SADD', key('artifacts', session_id), artifact) end
-- The log of an execution long past goes; its record tells what came of it.
local past = redis.call('ZREVRANGE', order, LIFE.logs_kept, LIFE.logs_kept)[1]
if past and not redis.call('ZSCORE', unfinished, past) then
  redis.call('UNLINK', key('log', past))
end
if idempotency_key ~= '' then
  redis.call('HSET', idempotency, idempotency_key, instant(now) .. ' ' .. digest .. ' ' .. id)
end
redis.call('XADD', key('log', id), '0-1', 'session', session_id)
touch(session_id, session)
return {'created', instant(now)}
