//! Calls under different names.
