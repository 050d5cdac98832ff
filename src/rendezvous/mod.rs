//! Where am I, the key-value store, and the agreement between ranks.

pub mod store;
