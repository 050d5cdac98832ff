//! The tool `devicemesh`.
fn main() {}
