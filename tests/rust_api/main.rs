//! The crate as a Rust library: worlds, meshes and collectives over slices, with ranks as threads.

mod arrays;
#[path = "../cargo_build/mod.rs"]
mod cargo_build;
mod collectives;
#[path = "../comm_timeout/mod.rs"]
mod comm_timeout;
mod recovery;
mod threads;

use std::sync::Arc;
use std::time::Duration;

use devicemesh::comm::{MeshOptions, Operator, RootComms, View, World, WorldOptions};
use devicemesh::error::Status;
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::rendezvous::JoinOptions;
use devicemesh::rendezvous::store::{MemoryStore, Store};

/// Runs `body` on so many ranks, each with a (2, size / 2) mesh of its own world.
fn on_ranks(size: usize, body: impl Fn(&View, usize) + Sync) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let join = JoinOptions::ranked(rank, size).timeout(Duration::from_secs(60)).store(store);
                let world = Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap());
                let mesh = View::init(&world, &[2, size / 2], &["replicate", "shard"]).unwrap();
                body(&mesh, rank);
                mesh.root_comms().finalize().unwrap();
            });
        }
    });
}

/// Runs `body` with a world of its own on so many ranks, and gives what each returns.
fn in_worlds<T: Send>(size: usize, body: impl Fn(&Arc<World>, usize) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let (store, body) = (Arc::clone(&store), &body);
            scope.spawn(move || {
                let join = JoinOptions::ranked(rank, size).timeout(Duration::from_secs(60)).store(store);
                body(&Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap()), rank)
            })
        };
        let ranks: Vec<_> = (0..size).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_mesh_of_another_world_is_refused_on_all_ranks() {
    let errors = in_worlds(2, |world, rank| {
        let create = |device_type: &str, ranks: usize, of: usize| {
            let shape = [ranks];
            let spec = MeshSpec::new(device_type, &shape, ranks, of).names(&["dp"]);
            let made = RootComms::create(world, Mesh::new(&spec).unwrap(), &MeshOptions::default());
            made.err().map(|error| (error.status(), error.message().to_owned()))
        };
        let own = |device_type: &str, ranks: usize, of: usize| match rank {
            0 => create(device_type, ranks, of),
            _ => create("cpu", 2, 1),
        };
        let refused = [own("cpu", 8, 0), own("cpu", 2, 1), own("cuda", 2, 0)];
        assert_eq!(create("cpu", 2, rank), None, "the ranks meet again");
        refused.map(Option::unwrap)
    });
    let words = [
        "has rank 7, but the world has 2 ranks",
        "was made for rank 1, but this is rank 0 of the world",
        "has device type cuda, but the world was joined for device type cpu",
    ];
    for (rank, refused) in errors.iter().enumerate() {
        for ((status, message), words) in refused.iter().zip(words) {
            assert_eq!(*status, Status::InvalidArgument, "{message}");
            assert!(message.contains(words), "rank {rank}: {message}");
        }
    }
}

#[test]
fn options_are_made_step_by_step() {
    let world = World::join("cpu", &WorldOptions::new(JoinOptions::ranked(3, 8).offline())).unwrap();
    let spec = MeshSpec::new("cpu", &[2, 2], 8, 3).names(&["dp", "tp"]).ranks(&[7, 5, 3, 1]);
    let options = MeshOptions::default().lazy().timeout(Duration::from_secs(1)).dims(vec![Default::default(); 2]);
    let mesh = View::of_root(RootComms::create(&Arc::new(world), Mesh::new(&spec).unwrap(), &options).unwrap());
    assert_eq!(mesh.mesh().coordinate().unwrap(), [1, 0]);
    assert_eq!(mesh.all_reduce("dp", &mut [0f32], Operator::Sum).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn an_index_that_no_dimension_has_is_an_error_wherever_one_can_be_given() {
    let mesh = Mesh::new(&MeshSpec::new("cpu", &[2, 4], 8, 6)).unwrap();
    let outside = Mesh::new(&MeshSpec::new("cpu", &[2], 8, 6)).unwrap();
    for index in [2, 9, usize::MAX] {
        let refused = |error: devicemesh::error::Error| {
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.message().starts_with(&format!("there is no dimension {index} in ")), "{error}");
        };
        for mesh in [&mesh, &outside] {
            refused(mesh.local_rank(index).unwrap_err());
            refused(mesh.group_ranks(index).unwrap_err());
            refused(mesh.each_group_rank(index).err().unwrap());
            refused(mesh.translate_rank(index, 0).unwrap_err());
            refused(mesh.neighbor(index, 1, true).unwrap_err());
            refused(mesh.split_color_key(index).unwrap_err());
            refused(mesh.without(index, &[1], 8).unwrap_err());
        }
    }
}
