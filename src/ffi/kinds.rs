//! The kinds of handles, so that a handle of one kind is never taken for one of another kind.

/// The upper 16 bits of every handle of a kind. The compiler refuses two kinds with one number. A
/// number is no prefix of an address: its top bit and some other upper bit differ.
#[derive(Clone, Copy)]
#[repr(u16)]
pub(super) enum HandleKind {
    /// A dm_world.
    World = 0xd357,
    /// The dm_world in dm_world_options.joining_out, while the process joins.
    Joining = 0xd359,
    /// A dm_buffers.
    Buffers = 0xd35b,
    /// A dm_events.
    Events = 0xd35d,
    /// A dm_mesh.
    Mesh = 0xd35e,
}

impl HandleKind {
    /// The number of the kind, for its table.
    pub(super) const fn number(self) -> u16 {
        self as u16
    }
}
