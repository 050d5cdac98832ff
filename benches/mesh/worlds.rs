//! The worlds and meshes that are measured.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::{Barrier, mpsc};

use devicemesh::ffi::{DM_WORLD_OFFLINE, dm_init_options, dm_world, dm_world_options};

use crate::library::{Library, Mesh};

/// The sizes of worlds, each as a mesh of four dimensions.
pub const SHAPES: [[usize; 4]; 3] = [[2, 2, 2, 1], [8, 4, 8, 4], [64, 32, 64, 8]];
pub const NAMES: [*const c_char; 4] = [c"pp".as_ptr(), c"dp".as_ptr(), c"cp".as_ptr(), c"tp".as_ptr()];
pub const PAIR: [*const c_char; 2] = [c"dp".as_ptr(), c"cp".as_ptr()];

pub fn size(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// A rank that is neither the first nor the last along most dimensions.
pub fn rank(shape: &[usize]) -> usize {
    size(shape) * 3 / 4 + 1
}

/// A world without other processes.
pub struct Offline {
    pub library: &'static Library,
    pub world: *mut dm_world,
    pub shape: [usize; 4],
}

impl Offline {
    pub fn new(library: &'static Library, shape: [usize; 4]) -> Offline {
        let options = dm_world_options {
            flags: DM_WORLD_OFFLINE,
            world_size: size(&shape) as i32,
            rank: rank(&shape) as i32,
            ..no_options()
        };
        // SAFETY: strings and structs as the header asks for.
        let world = library.made(|out| unsafe { (library.world_init)(c"cpu".as_ptr(), &options, out) });
        Offline { library, world, shape }
    }

    /// dm_init of the whole world; `ranks` lists its ranks or is empty.
    pub fn mesh(&self, ranks: &[i32]) -> Mesh {
        let (ranks, num_ranks) = if ranks.is_empty() { (ptr::null(), 0) } else { (ranks.as_ptr(), ranks.len()) };
        let options = dm_init_options { ranks, num_ranks, ..init_options(self.world) };
        let shape = self.shape.map(|size| size as i32);
        Mesh::new(self.library, |out| {
            // SAFETY: four sizes and four names, and as many ranks as the sizes multiply to.
            unsafe { (self.library.init)(c"cpu".as_ptr(), shape.as_ptr(), 4, NAMES.as_ptr(), &options, out) }
        })
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        // SAFETY: a handle of this library.
        unsafe { (self.library.world_free)(self.world) }
    }
}

/// All ranks in reverse. The library must keep this list, because it is not row-major.
pub fn reversed(shape: &[usize]) -> Vec<i32> {
    (0..size(shape) as i32).rev().collect()
}

/// Joins a world of that many ranks on the host engine, a thread each, and lets `use_it` have the
/// mesh of rank 0, of which every dimension has a communicator.
pub fn with_communicators<R>(library: &'static Library, shape: &[usize], use_it: impl FnOnce(&Mesh) -> R) -> R {
    let ranks = size(shape);
    let folder = std::env::temp_dir().join(format!("devicemesh-bench-{}-{ranks}", std::process::id()));
    let method = CString::new(format!("file://{}", folder.display())).expect("a path without NUL");
    let joined = Barrier::new(ranks);
    let result = std::thread::scope(|scope| {
        let others: Vec<mpsc::Sender<()>> = (1..ranks)
            .map(|rank| {
                let (done, wait) = mpsc::channel();
                let (method, joined) = (&method, &joined);
                scope.spawn(move || {
                    let mesh = join(library, method, shape, rank);
                    joined.wait();
                    let _ = wait.recv();
                    end(mesh);
                });
                done
            })
            .collect();
        let mesh = join(library, &method, shape, 0);
        joined.wait();
        let result = use_it(&mesh);
        drop(others);
        end(mesh);
        result
    });
    let _ = std::fs::remove_dir_all(&folder);
    let _ = std::fs::remove_file(&folder);
    result
}

fn join(library: &'static Library, method: &CString, shape: &[usize], rank: usize) -> Mesh {
    let options = dm_world_options {
        world_size: size(shape) as i32,
        rank: rank as i32,
        local_rank: rank as i32,
        timeout_ms: 60_000,
        init_method: method.as_ptr(),
        ..no_options()
    };
    // SAFETY: as in `Offline`.
    unsafe {
        let world = library.made(|out| (library.world_init)(c"cpu".as_ptr(), &options, out));
        let options = init_options(world);
        let shape: Vec<i32> = shape.iter().map(|size| *size as i32).collect();
        let init = |out| (library.init)(c"cpu".as_ptr(), shape.as_ptr(), shape.len(), NAMES.as_ptr(), &options, out);
        let mesh = Mesh::new(library, init);
        (library.world_free)(world);
        mesh
    }
}

fn end(mesh: Mesh) {
    // SAFETY: a live handle; every rank of the mesh does the same.
    mesh.library.check(unsafe { (mesh.library.finalize)(mesh.handle, ptr::null()) });
}

fn no_options() -> dm_world_options {
    dm_world_options {
        struct_size: size_of::<dm_world_options>(),
        flags: 0,
        world_size: 0,
        rank: 0,
        local_rank: 0,
        device: 0,
        join: 0,
        timeout_ms: 0,
        init_method: ptr::null(),
        ccl_library: ptr::null(),
        store: ptr::null(),
        joining_out: ptr::null_mut(),
    }
}

fn init_options(world: *mut dm_world) -> dm_init_options {
    dm_init_options {
        struct_size: size_of::<dm_init_options>(),
        flags: 0,
        reserved: 0,
        world,
        ranks: ptr::null(),
        num_ranks: 0,
        dim_options: ptr::null(),
        num_dim_options: 0,
        timeout_ms: 0,
    }
}
