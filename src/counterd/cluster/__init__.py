"""Limits that the daemons of many machines share through a Redis or Valkey: `authority.lua` decides there."""
