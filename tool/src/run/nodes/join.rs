//! Brings a node to the job's store, where it finds the other nodes and learns its share of the
//! ranks.

use devicemesh::error::{Error, Status};
use devicemesh::printable::printable;
use devicemesh::wait::Wait;

use super::board::Board;
use super::entry::{Entry, LastWord, list, numbers};
use super::heir::Heir;
use super::keys::{self, GONE, LOCKED_OUT, NODES, OVER, SERVED, STRANGERS};
use super::peer::{from_a_peer, read_cause};
use super::place::Place;
use super::progress::{Progress, absent, present};
use super::reach::reach;
use super::shared::{News, Reached, Shared, TELL};
use crate::run::assignment::Assignment;
use crate::run::cause::Cause;
use crate::run::identity::default_id;
use crate::run::rendezvous::Rendezvous;

/// Meets the other nodes. An error of any node ends the job for all nodes, except an error of a
/// node that came when the job was complete, or that belongs to another job.
pub fn join(shared: &Shared, rendezvous: &Rendezvous) -> Result<Assignment, Cause> {
    let refused = |error: Error| Cause::Refused { message: error.message().to_owned() };
    let wait = shared.wait(rendezvous.timeout);
    let mut progress = Progress::new(shared, &wait, !rendezvous.all_report);
    let reached = reach(rendezvous, &wait, &mut progress).map_err(refused)?;
    let Reached { store, place, server, begins } = shared.reached.get_or_init(|| reached);
    let me = Entry::of_this_node(rendezvous);
    let nodes = if *begins { me.nodes } else { compare_with_first(store, &me, rendezvous, &wait)? };
    let arrival = register(store, &me, server.is_some(), &wait).map_err(refused)?;
    // The job of the nodes that were there before goes on.
    let too_many = arrival > nodes;
    if !too_many {
        shared.admit(arrival)?;
    } else if rendezvous.heals {
        let heir = Heir { shared, rendezvous, store, arrival };
        let taken = match heir.take(&mut progress)? {
            Ok(taken) => taken,
            Err(entries) => return Err(one_too_many(rendezvous, &entries)),
        };
        let _ = (shared.arrival.set(arrival), shared.post.set(taken.post.first));
        note_server(shared, &taken.entries);
        let assignment = assign(rendezvous, store.job(), &taken.entries, taken.post.first)?;
        return Ok(taken.complete(assignment, shared, me.host));
    }
    // With a service, node 0 speaks for all.
    let speaks = server.is_some() || (rendezvous.has_service() && rendezvous.node == Some(0));
    let is_silent = !rendezvous.all_report && !speaks;
    let (entries, refused_node, locked_out) = (Vec::new(), String::new(), String::new());
    let mut arriving = Arriving {
        shared,
        rendezvous,
        store,
        place,
        me,
        arrival,
        is_silent,
        entries,
        refused: refused_node,
        locked_out,
    };
    let collected = arriving.collect(&mut progress);
    let entries = arriving.entries;
    match collected {
        Ok(()) if too_many => Err(one_too_many(rendezvous, &entries)),
        Ok(()) => {
            note_server(shared, &entries);
            assign(rendezvous, store.job(), &entries, arrival)
        }
        Err(cause) if too_many || shared.is_cancelled() => Err(cause),
        Err(cause) => Err(shared.end(cause)),
    }
}

/// Notes which node serves the store: the first one, where it is not a service.
fn note_server(shared: &Shared, entries: &[Entry]) {
    if shared.reached.get().is_some_and(|reached| reached.store.job().is_some()) {
        return;
    }
    let number = numbers(entries)[0];
    let _ = shared.serving.set((format!("node {number} ({})", entries[0].host), number));
}

/// Returns how many nodes the job has whose store this is. Fails where it is another job. That job
/// goes on, and its nodes that wait learn which node was refused.
fn compare_with_first(store: &Board, me: &Entry, rendezvous: &Rendezvous, wait: &Wait) -> Result<u32, Cause> {
    let refused = |error: Error| Cause::Refused { message: error.message().to_owned() };
    let first = Entry::read(&store.get(&keys::node(1), wait).map_err(refused)?)?;
    let Some(message) = me.strangeness(&first, rendezvous) else { return Ok(first.nodes) };
    let tell = || -> Result<(), Error> {
        let wait = Wait::after(TELL);
        let count = store.add(STRANGERS, 1, &wait)?;
        let text = serde_json::to_vec(&message).map_err(|error| Error::internal(error.to_string()))?;
        store.set(&keys::stranger(count), &text, &wait)
    };
    // An error is ignored, because the nodes that wait then only know less.
    let _ = tell();
    Err(Cause::Refused { message })
}

/// Leaves this node's entry in the store. Returns its arrival number, which is 1 for the node that
/// serves the store.
fn register(store: &Board, me: &Entry, serves: bool, wait: &Wait) -> Result<u32, Error> {
    let arrival = store.add(NODES, 1, wait)?;
    if !store.leave_last_word(GONE, arrival.to_string().as_bytes(), wait)? {
        return Err(Error::store(format!("{} is not served by libdevicemesh", store.name())));
    }
    let text = serde_json::to_vec(me).map_err(|error| Error::internal(error.to_string()))?;
    store.set(&keys::node(arrival), &text, wait)?;
    if serves {
        store.set(SERVED, b"1", wait)?;
    }
    u32::try_from(arrival).map_err(|_| Error::store(format!("{arrival} nodes came to {}", store.name())))
}

/// The nodes that have arrived so far, as this node has read them.
struct Arriving<'a> {
    shared: &'a Shared,
    rendezvous: &'a Rendezvous,
    store: &'a Board,
    place: &'a Place,
    me: Entry,
    /// The arrival number of this node.
    arrival: u32,
    /// Whether another node says for whom the job waits.
    is_silent: bool,
    /// The entries in the order of arrival.
    entries: Vec<Entry>,
    /// Why a node was refused, where that has happened. It may be one that this job waits for.
    refused: String,
    /// The store's text about connections that it has refused because of their secrets. They may be
    /// from a node that this job waits for. Empty where there were none.
    locked_out: String,
}

impl Arriving<'_> {
    /// Reads the entries of all nodes, and compares each with this node's. After an error `entries`
    /// holds those that were read.
    fn collect(&mut self, progress: &mut Progress<'_>) -> Result<(), Cause> {
        let (mut gone, mut strangers) = (0, 0);
        while self.entries.len() < self.rendezvous.nodes as usize {
            let (next, lost) = (keys::node(self.entries.len() + 1), keys::gone(gone + 1));
            let stranger = keys::stranger(strangers + 1);
            // The store answers with the first key of this list that is there. Nothing is read
            // after the last entry, so the key of a stranger stands before the key of an entry.
            let wanted = [OVER, &stranger, &next, &lost, LOCKED_OUT];
            // The last of these keys stays in the store once it is there.
            let wanted = &wanted[..wanted.len() - usize::from(!self.locked_out.is_empty())];
            match self.store.get_any(wanted, &progress.pause(self.rendezvous.timeout)) {
                Ok((0, text)) => return Err(read_cause(&text)),
                Ok((1, text)) => {
                    strangers += 1;
                    self.tell_of_stranger(&from_a_peer::<String>(&text).unwrap_or_default());
                }
                Ok((2, text)) => self.add(Entry::read(&text)?)?,
                Ok((3, word)) => {
                    gone += 1;
                    if let Some(cause) = LastWord::read(&word).and_then(|word| self.gone(&word)) {
                        return Err(cause);
                    }
                }
                Ok((_, text)) => {
                    self.note_locked_out(&text, progress);
                    if !self.is_silent {
                        self.shared.tell(News::Note(self.locked_out.clone()));
                    }
                }
                Err(error) if error.status() == Status::Timeout => {
                    // More connections may have been refused than the store has told so far.
                    if let Ok(Some(text)) = self.store.try_get(LOCKED_OUT, &Wait::after(TELL)) {
                        self.note_locked_out(&text, progress);
                    }
                    if progress.is_over() {
                        return Err(Cause::Refused { message: self.missing() });
                    }
                }
                Err(error) => {
                    return Err(self.shared.store_lost(&error));
                }
            }
            let whom = || {
                let arrived = self.arrived();
                format!("{}; {}", absent(self.rendezvous, &arrived), present(&arrived))
            };
            progress.tell_unless(self.is_silent || self.is_complete(), whom);
        }
        Ok(())
    }

    /// The nodes that are known to have arrived. This node is one of them before it has read its
    /// own entry, unless it is one too many.
    fn arrived(&self) -> Vec<Entry> {
        let me = self.counts_itself().then(|| self.me.clone());
        self.entries.iter().cloned().chain(me).collect()
    }

    /// Whether this node is one of the job's nodes and has not read its own entry yet.
    fn counts_itself(&self) -> bool {
        (self.entries.len() + 1..=self.rendezvous.nodes as usize).contains(&(self.arrival as usize))
    }

    /// Whether all nodes have arrived, so that at most this node's own entry is still to be read.
    fn is_complete(&self) -> bool {
        self.entries.len() + usize::from(self.counts_itself()) >= self.rendezvous.nodes as usize
    }

    /// The cause that says that a node has gone. It may have gone before it left its entry, which
    /// then never comes. `None` for a node that came too late, and for one whose entry is still to
    /// be read.
    fn gone(&self, LastWord { arrival, is_killed }: &LastWord) -> Option<Cause> {
        let is_killed = Some(*is_killed);
        if let Some(entry) = self.entries.get(*arrival as usize - 1) {
            return Some(Cause::Gone { node: format!("the node on {entry}"), number: entry.node, is_killed });
        }
        let left = || self.store.try_get(&keys::node(arrival), &Wait::after(TELL));
        let is_missing = *arrival <= self.rendezvous.nodes && matches!(left(), Ok(None));
        let node = format!("the node that arrived as number {arrival}");
        is_missing.then_some(Cause::Gone { node, number: None, is_killed })
    }

    fn add(&mut self, their: Entry) -> Result<(), Cause> {
        let is_mine = self.entries.len() + 1 == self.arrival as usize;
        let disagreement = if is_mine { None } else { self.me.disagreement(&their) };
        self.entries.push(their);
        disagreement.map_or(Ok(()), |message| Err(Cause::Refused { message }))
    }

    fn tell_of_stranger(&mut self, said: &str) {
        self.refused = format!("refused a node of another job: {said}");
        if !self.is_silent {
            self.shared.tell(News::Note(self.refused.clone()));
        }
    }

    /// Notes what the store says of connections that it has refused, for all lines from now on.
    fn note_locked_out(&mut self, said: &[u8], progress: &mut Progress<'_>) {
        let said = String::from_utf8_lossy(said);
        self.locked_out = format!("{}: give all nodes the same DM_STORE_SECRET, or none", printable(&said));
        progress.remark(format!("{}; {}", self.place.remark, self.locked_out));
    }

    /// Says which nodes have not arrived.
    fn missing(&self) -> String {
        let (at, seconds) = (&self.place.at, self.rendezvous.timeout.as_secs_f64());
        if self.is_complete() {
            return format!("all nodes came to {at}, which gave no answer within {seconds} s (--rdzv-timeout)");
        }
        let arrived = self.arrived();
        format!(
            "{} did not come to {at} within {seconds} s (--rdzv-timeout); {}: start the same devicemesh run on every node{}{}",
            absent(self.rendezvous, &arrived),
            present(&arrived),
            self.place.remark,
            [&self.refused, &self.locked_out]
                .map(|said| if said.is_empty() { String::new() } else { format!("; {said}") })
                .concat()
        )
    }
}

fn one_too_many(rendezvous: &Rendezvous, entries: &[Entry]) -> Cause {
    let message = format!(
        "{} serves {}, which has its {} already ({}): {}",
        rendezvous.store(),
        entries[0].job(),
        if entries.len() == 1 { "node".to_owned() } else { format!("{} nodes", entries.len()) },
        list(entries),
        rendezvous.advice_on_another_job()
    );
    Cause::Refused { message }
}

/// This node's share of the ranks. Node 0 has the first ranks. `job` is the number of the job in
/// the store of a service.
fn assign(rendezvous: &Rendezvous, job: Option<u64>, entries: &[Entry], arrival: u32) -> Result<Assignment, Cause> {
    let numbers = numbers(entries);
    let index = arrival as usize - 1;
    let node = numbers[index];
    let sum = |of: &dyn Fn(&Entry) -> u64, counts: &dyn Fn(u32) -> bool| -> u64 {
        let counted = entries.iter().zip(&numbers).filter(|(_, number)| counts(**number));
        counted.map(|(entry, _)| of(entry)).sum()
    };
    let spares = |entry: &Entry| u64::from(entry.restart.spares);
    let others = |entry: &Entry| u64::from(entry.ranks).saturating_sub(spares(entry));
    let (is_before, is_any) = (|number: u32| number < node, |_| true);
    let (first_rank, mesh_size) = (sum(&others, &is_before), sum(&others, &is_any));
    let (first_spare, world_size) = (mesh_size + sum(&spares, &is_before), mesh_size + sum(&spares, &is_any));
    let Some(world_size) = u32::try_from(world_size).ok().filter(|size| *size <= i32::MAX as u32) else {
        return Err(Cause::Refused { message: format!("{world_size} ranks are more than a world can have") });
    };
    // The tool of a node may have been started anew, and then it knows less than the others.
    let oldest = entries.iter().rev().max_by_key(|entry| entry.restart.restarts).unwrap_or(&entries[0]);
    let known = rendezvous.id.clone().or_else(|| oldest.run_id.clone());
    let id = known.unwrap_or_else(|| default_id(&entries[0].host, entries[0].pid));
    Ok(Assignment {
        node,
        nodes: rendezvous.nodes,
        first_rank: first_rank as u32,
        first_spare: first_spare as u32,
        ranks: rendezvous.ranks,
        spares: rendezvous.restart.spares,
        world_size,
        mesh_size: mesh_size as u32,
        host: rendezvous.host.clone(),
        port: rendezvous.port,
        id,
        run: oldest.run.clone(),
        host_name: (rendezvous.nodes > 1).then(|| entries[index].host.clone()),
        // A peer may say anything.
        restarts: oldest.restart.restarts.min(rendezvous.restart.most),
        rejoins: 0,
        max_restarts: rendezvous.restart.most,
        job,
        relay: None,
    })
}
