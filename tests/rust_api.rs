//! The crate as a Rust library: worlds, meshes and collectives over slices, with ranks as threads.

use std::sync::Arc;
use std::time::Duration;

use devicemesh::comm::{Domain, DomainOptions, Element, Operator, View};
use devicemesh::error::Status;
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
                let world = Arc::new(Domain::join("cpu", &DomainOptions::new(join)).unwrap());
                let mesh = View::init(&world, &[2, size / 2], &["replicate", "shard"]).unwrap();
                body(&mesh, rank);
                mesh.root_comms().finalize().unwrap();
            });
        }
    });
}

#[test]
fn collectives_over_slices() {
    on_ranks(4, |mesh, rank| {
        assert_eq!(mesh.mesh().coordinate().unwrap(), [rank / 2, rank % 2]);
        let (along_replicate, along_shard) = ([rank % 2, rank % 2 + 2], [rank / 2 * 2, rank / 2 * 2 + 1]);

        let mut sum = [rank as i64, 10];
        mesh.all_reduce("replicate", &mut sum, Operator::Sum).unwrap();
        assert_eq!(sum, [along_replicate.iter().sum::<usize>() as i64, 20]);
        let mut largest = [rank as f64];
        mesh.all_reduce("shard", &mut largest, Operator::Max).unwrap();
        assert_eq!(largest, [along_shard[1] as f64]);

        let mut copied = [rank as u8; 3];
        mesh.broadcast("shard", &mut copied, 1).unwrap();
        assert_eq!(copied, [along_shard[1] as u8; 3]);

        let mut gathered = [0u32; 4];
        mesh.all_gather("replicate", &[rank as u32, 7], &mut gathered).unwrap();
        assert_eq!(gathered, [along_replicate[0] as u32, 7, along_replicate[1] as u32, 7]);

        let mut block = [0f32];
        mesh.reduce_scatter("shard", &[rank as f32, 100.0 + rank as f32], &mut block, Operator::Average).unwrap();
        let mean = (along_shard[0] + along_shard[1]) as f32 / 2.0;
        assert_eq!(block, [if rank % 2 == 0 { mean } else { 100.0 + mean }]);

        let mut exchanged = [0i32; 2];
        mesh.all_to_all("shard", &[rank as i32 * 10, rank as i32 * 10 + 1], &mut exchanged).unwrap();
        assert_eq!(exchanged, along_shard.map(|peer| (peer * 10 + rank % 2) as i32));

        // A flattened dimension, under its name, from the view that it was made of.
        mesh.flatten(Some("all"), Default::default()).unwrap();
        let mut everybody = [1u64];
        mesh.all_reduce("all", &mut everybody, Operator::Sum).unwrap();
        assert_eq!(everybody, [4]);
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_moves() {
    on_ranks(2, |mesh, _| {
        let refused = |result: devicemesh::error::Result<()>, status, words: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.status(), status, "{error}");
            assert!(error.message().contains(words), "{error}, expected {words}");
        };
        let mut four = [0f32; 4];
        refused(mesh.all_reduce("nowhere", &mut four, Operator::Sum), Status::NotFound, "nowhere");
        refused(mesh.broadcast("replicate", &mut four, 2), Status::InvalidArgument, "root is 2");
        refused(
            mesh.all_gather("replicate", &[1.0; 3], &mut four),
            Status::InvalidArgument,
            "expected 2 times the 3 of send",
        );
        refused(
            mesh.reduce_scatter("replicate", &[1.0; 3], &mut four, Operator::Sum),
            Status::InvalidArgument,
            "send has 3 elements, expected 2 times the 4 of recv",
        );
        refused(
            mesh.all_to_all("replicate", &[1.0; 3], &mut [0.0; 3]),
            Status::InvalidArgument,
            "the same multiple of 2",
        );
        mesh.group_start().unwrap();
        refused(mesh.all_reduce("replicate", &mut four, Operator::Sum), Status::Unsupported, "end the group first");
        mesh.group_end().unwrap();
        mesh.all_reduce("replicate", &mut four, Operator::Sum).unwrap();
    });
}

#[test]
fn what_is_shared_between_threads_may_be() {
    fn shared<T: Send + Sync>() {}
    shared::<View>();
    shared::<Domain>();
    shared::<devicemesh::mesh::Mesh>();
    shared::<devicemesh::error::Error>();
    fn elements<T: Element>() {}
    elements::<f32>();
}
