//! The events which say that a rank has ended a root mesh by dm_abort. On a library with streams
//! they also say that another rank has ended the mesh by dm_recover or dm_shrink.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{LifeFlag, RootComms};
use crate::events::{self, Event, Kind};
use crate::rank_list::ranges;
use crate::rendezvous::Departures;
use crate::wait::Wait;

/// The time between two questions to the store. All ranks of a world ask one server.
const ASK: Duration = Duration::from_secs(2);

/// How long the store may take to answer.
const SHORT: Duration = Duration::from_millis(200);

/// Watches for ranks that end a mesh, for the events of this process.
pub(super) struct DepartureWatch {
    /// Whether the mesh is alive on this rank. A mesh that has ended here gives no further events.
    life: Arc<LifeFlag>,
    /// The event, without the ranks and the message.
    event: Event,
    /// The functions by which a rank may have ended the mesh.
    ways: &'static str,
    /// A look holds this lock. So the end of the mesh waits for a look that is in progress, and
    /// then takes the value out.
    looking: Mutex<Option<Looking>>,
}

/// The state of the looks: what they use, and what they have found.
struct Looking {
    /// The ranks that have ended the mesh, in the store of the world.
    departures: Arc<Departures>,
    /// When the store was asked last; `None` where nobody has asked.
    asked: Option<Instant>,
    /// The ranks whose aborts were reported.
    told: Vec<i32>,
}

impl DepartureWatch {
    /// Watches this root for as long as the result lives. `None` where the root has no other ranks
    /// with which it agrees.
    pub(super) fn begin(root: &RootComms) -> Option<Arc<dyn events::Source>> {
        let departures = Arc::clone(root.departures.as_ref().filter(|_| root.mesh.root_size() > 1)?);
        let event = root.event(Kind::Aborted, String::new());
        // On the host engine the abort itself tells the other ranks of dm_recover and dm_shrink.
        let has_streams = root.library.as_ref().is_some_and(|library| library.has_streams());
        let ways = if has_streams { "dm_abort, dm_recover or dm_shrink" } else { "dm_abort" };
        let looking = Looking { departures, asked: None, told: Vec::new() };
        let watch = DepartureWatch { life: root.life_flag(), event, ways, looking: Mutex::new(Some(looking)) };
        let watch: Arc<dyn events::Source> = Arc::new(watch);
        events::announce(Arc::downgrade(&watch));
        Some(watch)
    }
}

impl events::Source for DepartureWatch {
    fn joined(&self) -> Option<Event> {
        None
    }

    fn look(&self) -> Vec<Event> {
        let mut looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(looking) = looking.as_mut() else { return Vec::new() };
        if !self.life.is_alive() || looking.asked.is_some_and(|asked| asked.elapsed() < ASK) {
            return Vec::new();
        }
        looking.asked = Some(Instant::now());
        let mut ranks = looking.departures.others(&Wait::after(SHORT)).unwrap_or_default();
        ranks.retain(|rank| !looking.told.contains(rank));
        if ranks.is_empty() {
            return Vec::new();
        }
        looking.told.extend(&ranks);
        let (me, group) = (self.event.rank, self.event.group.as_deref().unwrap_or_default());
        let message = format!("rank {me}: {} ended {group} by {}", ranges(&ranks), self.ways);
        let time = std::time::SystemTime::now();
        vec![Event { time, message, ..self.event.clone() }.about(ranks)]
    }

    fn release(&self) {
        drop(events::take_from_source(&self.looking));
    }
}

impl RootComms {
    /// An event about this root.
    pub(in crate::comm) fn event(&self, kind: Kind, message: String) -> Event {
        let event = match &self.world {
            Some(world) => world.event(kind, message),
            None => Event::new(kind, (self.mesh.rank() as usize, self.mesh.size()), 0, message),
        };
        Event { epoch: self.epoch, ..event }.of_group(self.name())
    }
}
