//! Calls that differ between hosts.
