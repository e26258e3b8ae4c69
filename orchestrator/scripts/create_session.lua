#!lua
local id, tenant, name, idle_minutes, memory_limit = unpack(ARGV, 1, 5)
local worker, epoch, max_lifetime, tenant_limit = unpack(ARGV, 6, 9)

local known = read_session(id)
if known then return {'ok', known} end

local tenant_running = key('tenant_running', tenant)
if tenant_limit ~= '' and redis.call('SCARD', tenant_running) >= tonumber(tenant_limit) then
  return {'tenant_quota'}
end

local expires_at = ''
if max_lifetime ~= '' then expires_at = instant(now + tonumber(max_lifetime)) end
redis.call('HSET', key('session', id),
  'tenant', tenant, 'name', name, 'status', 'running', 'created_at', instant(now),
  'idle_minutes', idle_minutes, 'expires_at', expires_at, 'memory_limit', memory_limit,
  'worker_id', worker, 'epoch', epoch, 'ended_at', '', 'end_reason', '')
local tenant_sessions = key('tenant_sessions', tenant)
redis.call('ZADD', tenant_sessions, next_position(tenant_sessions), id)
redis.call('SADD', tenant_running, id)
redis.call('SADD', key('worker_sessions', worker), id)
touch(id, read_session(id))
return {'ok', read_session(id)}
