//! A world of two ranks for tests, whose ranks are threads of this process.

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
    std::thread::scope(|threads| {
        for rank in 0..2 {
            let (store, run) = (Arc::clone(&store), &run);
            threads.spawn(move || {
                let join = JoinOptions::ranked(rank, 2).store(store).timeout(Duration::from_secs(30));
                run(&Arc::new(World::join("cpu", &WorldOptions::new(join)).unwrap()));
            });
        }
    });
}
