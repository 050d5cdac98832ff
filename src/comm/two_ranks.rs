//! A world of two or more ranks for tests, whose ranks are threads of this process.

use std::sync::Arc;
use std::time::Duration;

use super::world::World;
use super::world_options::WorldOptions;
use crate::rendezvous::JoinOptions;
use crate::rendezvous::store::{MemoryStore, Store};

/// Runs `run` on both ranks at the same time.
pub(crate) fn two_ranks(run: impl Fn(&Arc<World>) + Sync) {
    two_ranks_over(Arc::new(MemoryStore::new()), run);
}

/// Does what [`two_ranks`] does, in this store.
pub(crate) fn two_ranks_over(store: Arc<dyn Store>, run: impl Fn(&Arc<World>) + Sync) {
    ranks_over(2, store, run);
}

/// Does what [`two_ranks_over`] does, with `size` ranks.
pub(crate) fn ranks_over(size: usize, store: Arc<dyn Store>, run: impl Fn(&Arc<World>) + Sync) {
    std::thread::scope(|threads| {
        for rank in 0..size {
            let (store, run) = (Arc::clone(&store), &run);
            threads.spawn(move || {
                let join = JoinOptions::ranked(rank, size).store(store).timeout(Duration::from_secs(30));
                run(&Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap()));
            });
        }
    });
}
