//! Random sequences of calls of the C ABI, which are decoded from any bytes. The fuzz target and
//! the replay of its corpus share this module.
//!
//! A world is an offline one of any size, or a real one of this process alone (the host engine).
//! So everything is local. Arguments are good, bad and absurd: live, freed, made-up and NULL
//! handles, struct sizes that lie within their allocation, strings that cannot be names, buffers
//! without a byte to spare. [`Session::ended`] and the lines after each call check what must hold
//! after the call. AddressSanitizer sees the rest.
//!
//! Two kinds of calls are left out. dm_default_world_abort ends the default worlds for good, so it
//! would outlast the input. And pointers to less memory than the call is told, or to no
//! communicator, are undefined.

mod asking;
mod carrying;
mod collectives;
mod control;
mod ending;
mod events;
mod making;
mod memory;
mod views;
mod worlds;

use std::ffi::CStr;

use arbitrary::Unstructured;
use devicemesh::ffi::*;

use memory::{Room, Text, Texts};

/// The most calls of one input.
const MOST_CALLS: usize = 150;

/// One call, with arguments that it picks.
type Call = fn(&mut Session<'_>);

/// A handle that a call gave.
struct Known {
    token: usize,
    alive: bool,
    /// Whether it belongs to a world with communicators.
    real: bool,
}

/// A handle as an argument.
#[derive(Clone, Copy)]
struct Handle {
    token: usize,
    alive: bool,
    real: bool,
}

impl Handle {
    fn mesh(self) -> *mut dm_mesh {
        self.token as *mut dm_mesh
    }

    fn world(self) -> *mut dm_world {
        self.token as *mut dm_world
    }
}

/// The facts about a call that are certain before the call is made.
#[derive(Clone, Copy, Default)]
struct Given {
    /// One of the handles is not live.
    dead: bool,
    /// Another argument is never allowed.
    wrong: bool,
    /// Another argument may be refused for its own sake.
    unsure: bool,
}

/// The state that an input's calls have made.
pub struct Session<'a> {
    choices: Unstructured<'a>,
    worlds: Vec<Known>,
    meshes: Vec<Known>,
    /// A handle of each root mesh with communicators. No call frees it, because it is needed to
    /// end the mesh.
    keepers: Vec<usize>,
    /// The number of groups that were begun and not ended.
    groups: usize,
    /// The buffers on which operations of a group still work.
    kept: Vec<Room<u8>>,
    stores: Vec<*mut worlds::Counted>,
    /// The handles of results of the control plane, and whether each of them is live.
    results: Vec<(usize, bool)>,
}

/// Makes the calls that these bytes say. Panics where a call does not keep the contract.
pub fn check_any_calls(bytes: &[u8]) {
    let mut session = Session {
        choices: Unstructured::new(bytes),
        worlds: Vec::new(),
        meshes: Vec::new(),
        keepers: Vec::new(),
        groups: 0,
        kept: Vec::new(),
        stores: Vec::new(),
        results: Vec::new(),
    };
    let calls: Vec<Call> = [
        worlds::CALLS,
        making::CALLS,
        views::CALLS,
        asking::CALLS,
        collectives::CALLS,
        carrying::CALLS,
        control::CALLS,
        ending::CALLS,
        events::CALLS,
    ]
    .concat();
    // A world and a mesh exist from the start, so that short inputs get far.
    worlds::offline_world(&mut session);
    making::plain_mesh(&mut session);
    for _ in 0..MOST_CALLS {
        if session.choices.is_empty() {
            break;
        }
        let call = calls[session.below(calls.len())];
        call(&mut session);
    }
    session.finish();
}

impl Session<'_> {
    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.choices.int_in_range(0..=end.max(1) - 1).unwrap_or(0)
    }

    /// True once in `times`, and never when the bytes have run out.
    fn rarely(&mut self, times: u8) -> bool {
        self.choices.int_in_range(0..=times - 1).unwrap_or(0) == times - 1
    }

    /// Returns a number that is small, at an edge of its type, or anything.
    fn number(&mut self) -> u64 {
        match self.below(8) {
            0..=3 => self.below(9) as u64,
            4 => u64::MAX - self.below(3) as u64,
            5 => (i32::MAX as u64 - 1) + self.below(4) as u64,
            6 => 1 << self.below(64),
            _ => self.choices.arbitrary().unwrap_or(0),
        }
    }

    /// Returns a mesh handle, which mostly is live.
    fn mesh(&mut self) -> Handle {
        let pick = self.below(16);
        self.handle(pick, true)
    }

    /// Returns a world handle.
    fn world(&mut self) -> Handle {
        let pick = self.below(16);
        self.handle(pick, false)
    }

    fn handle(&mut self, pick: usize, of_mesh: bool) -> Handle {
        let (mine, others) = if of_mesh { (&self.meshes, &self.worlds) } else { (&self.worlds, &self.meshes) };
        let (count, any) = (mine.len(), mine.last().map_or(0, |known| known.token));
        let other = others.last().map_or(0, |known| known.token);
        let token = match pick {
            0 => 0,
            1 => self.number() as usize,
            2 => other,
            3 => any ^ 1 << self.below(64),
            _ if count == 0 => 0,
            // The latest handles come more often.
            4..=7 => any,
            _ => {
                let at = self.below(count);
                if of_mesh { self.meshes[at].token } else { self.worlds[at].token }
            }
        };
        let mine = if of_mesh { &self.meshes } else { &self.worlds };
        let known = mine.iter().find(|known| known.alive && known.token == token);
        let kept = of_mesh && self.keepers.contains(&token);
        Handle { token, alive: known.is_some() || kept, real: kept || known.is_some_and(|known| known.real) }
    }

    /// Returns any string, or NULL.
    fn text(&mut self) -> Text {
        const NAMES: [&[u8]; 12] = [
            b"dp",
            b"tp",
            b"dim_0",
            b"dp_tp",
            b"a",
            b"b",
            b"",
            b"\xff\xfe",
            b"two\nlines",
            b"%s%n",
            "\u{e9}\u{202e}".as_bytes(),
            b"'\"\\",
        ];
        match self.below(NAMES.len() + 3) {
            at if at < NAMES.len() => Text::new(NAMES[at]),
            12 => Text::null(),
            13 => Text::new(&vec![b'x'; 1 << self.below(17)]),
            _ => {
                let length = self.below(12);
                Text::new(self.choices.bytes(length).unwrap_or(b"q"))
            }
        }
    }

    /// Returns a name, which mostly is that of one of the mesh's dimensions.
    fn dim_of(&mut self, mesh: Handle) -> Text {
        if self.rarely(4) {
            return self.text();
        }
        let count = dm_ndim(mesh.mesh());
        if count == 0 {
            return self.text();
        }
        let index = self.below(count);
        name_of(mesh, index)
    }

    /// Returns names of dimensions of the mesh and other names; now and then no array.
    fn dims_of(&mut self, mesh: Handle, most: usize) -> Texts {
        if self.rarely(24) {
            return Texts::null();
        }
        let count = self.below(most + 1);
        Texts::new((0..count).map(|_| self.dim_of(mesh)).collect())
    }

    /// Returns an out-parameter, which is rarely NULL.
    fn out<T: Copy>(&mut self) -> Room<T> {
        if self.rarely(24) { Room::null() } else { Room::new(1) }
    }

    /// Checks what holds for every call, and returns whether the call succeeded. The status exists
    /// and does not mean a bug of the library. One line says what is wrong. A handle that is not
    /// live gives INVALID_HANDLE. An argument that is never allowed is refused. A call that failed
    /// has not written `outs`.
    fn ended(&self, call: &str, status: dm_status, given: Given, outs: &[bool]) -> bool {
        let known = (DM_STATUS_OK..DM_STATUS_INTERNAL).contains(&status) || status == DM_STATUS_INVALID_STATE;
        assert!(known, "{call} gives {status}: {}", last_error());
        if status == DM_STATUS_OK {
            assert!(!given.dead && !given.wrong, "{call} takes what is not allowed");
            return true;
        }
        let message = last_error();
        assert!(!message.is_empty() && !message.contains('\n'), "{call} gives {status} and says {message:?}");
        let mut info = dm_error_info {
            struct_size: size_of::<dm_error_info>(),
            status: DM_STATUS_OK,
            ccl_result: 0,
            device_error: 0,
            os_error: 0,
            message: std::ptr::null(),
            ranks: std::ptr::null(),
            num_ranks: 0,
            lost_ranks: std::ptr::null(),
            num_lost: 0,
            dim: std::ptr::null(),
            waited_seconds: -1.0,
            call: -1,
        };
        // SAFETY: as large as it says.
        assert_eq!(unsafe { dm_last_error_info(&mut info) }, DM_STATUS_OK);
        assert_eq!(info.status, status, "{call}: the last error is this one: {message}");
        match given {
            Given { dead: true, wrong: false, unsure: false } => {
                assert_eq!(status, DM_STATUS_INVALID_HANDLE, "{call}: {message}")
            }
            Given { dead: false, .. } => assert_ne!(status, DM_STATUS_INVALID_HANDLE, "{call}: {message}"),
            _ => {}
        }
        assert!(outs.iter().all(|untouched| *untouched), "{call} gives {status} and wrote an output: {message}");
        false
    }

    /// Notes a mesh that a call gave.
    fn made(&mut self, token: *mut dm_mesh, real: bool) {
        let token = token as usize;
        assert!(!self.meshes.iter().any(|known| known.alive && known.token == token), "{token:#x} is given out twice");
        self.meshes.push(Known { token, alive: true, real });
    }

    /// Ends everything, because what is left would be a leak.
    fn finish(mut self) {
        collectives::end_groups(&mut self);
        control::free_results(&mut self);
        for keeper in std::mem::take(&mut self.keepers) {
            let mesh = keeper as *mut dm_mesh;
            // A mesh may have ended before.
            // SAFETY: no options.
            let ended = unsafe { dm_finalize(mesh, std::ptr::null()) };
            if ended != DM_STATUS_OK {
                dm_abort(mesh);
            }
            dm_free(mesh);
        }
        for known in &self.meshes {
            // Some handles are freed already, which does no harm.
            dm_free(known.token as *mut dm_mesh);
            assert_eq!(dm_ndim(known.token as *mut dm_mesh), 0);
        }
        making::forget_names();
        for known in &self.worlds {
            dm_world_free(known.token as *mut dm_world);
        }
        worlds::check_stores(&self.stores);
    }
}

/// This thread's last failure.
fn last_error() -> String {
    // SAFETY: never NULL, NUL-terminated, valid until the next failing call.
    let text = unsafe { CStr::from_ptr(dm_last_error()) };
    text.to_str().expect("messages are UTF-8").to_owned()
}

/// The name of a dimension; NULL past the end.
fn name_of(mesh: Handle, index: usize) -> Text {
    let name = dm_dim_name(mesh.mesh(), index);
    // SAFETY: the handle's own string, and the handle is freed by nobody meanwhile.
    if name.is_null() { Text::null() } else { Text::new(unsafe { CStr::from_ptr(name) }.to_bytes()) }
}
