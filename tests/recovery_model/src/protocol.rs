//! The protocol: what each process does next. docs/recovery.md says why.

use crate::job::{Job, Mistake, Silent};
use crate::library::{self, View};
use crate::state::{At, Decision, NOBODY, Plan, Set, State, Verdict, Why, one};

/// One process, and the job that it is in.
#[derive(Clone, Copy)]
pub(crate) struct Rank<'a> {
    /// The job.
    pub(crate) job: &'a Job,
    /// The number of the process.
    pub(crate) number: u8,
}

impl Rank<'_> {
    /// The name by which the store's keys and values know this process: its rank and its ticket,
    /// which no other process has.
    pub(crate) fn name(&self) -> u8 {
        match self.job.has(Mistake::NoTickets) {
            true => self.job.claim(self.number).unwrap_or(self.number),
            false => self.number,
        }
    }

    fn me(&self) -> Set {
        one(self.name())
    }

    /// Whether this process has died, and the store has not noticed yet.
    pub(crate) fn is_unnoticed(&self, state: &State) -> bool {
        state.process(self.number).at == At::Dead && state.store.lost & self.me() == 0
    }

    /// Makes the next operation of this process. Returns `false`, and changes nothing, when the
    /// process waits or has ended.
    pub(crate) fn step(&self, state: &mut State) -> bool {
        let looks = !self.job.has(Mistake::DoorWithoutLosses);
        match state.process(self.number).at {
            At::Out | At::Failed(..) | At::Fenced | At::Refused | At::Ended | At::Dead => return false,
            At::Door(number) => match state.store.decisions[usize::from(number)] {
                Some(decision) => self.read_at_the_door(state, number, decision),
                None if looks && self.waits_in_vain(state, number) => state.process_mut(self.number).at = At::Refused,
                None => return false,
            },
            At::Doubting(number) => match state.store.verdicts[usize::from(number)] {
                Some(Verdict::Made) => state.process_mut(self.number).at = At::Refused,
                Some(_) => state.process_mut(self.number).at = At::Door(number + 1),
                None if looks && self.waits_in_vain(state, number + 1) => {
                    state.process_mut(self.number).at = At::Refused
                }
                None => return false,
            },
            At::Training => match self.must_recover(state) {
                true => self.call(state),
                false => return false,
            },
            At::Comparing(number) => self.compare(state, number),
            At::Telling(number) => {
                state.store.told[usize::from(number)] = true;
                state.process_mut(self.number).at = At::Coming(number);
            }
            At::Coming(number) => self.come(state, number),
            At::Looking(number) => return self.look(state, number),
            At::Proposing(number, decision) => self.propose(state, number, decision),
            At::Writing(number, decision) => self.write(state, number, decision),
            At::Reading(number) => match state.store.decisions[usize::from(number)] {
                Some(decision) => self.act(state, number, decision),
                None => return false,
            },
            At::Meeting => self.meet(state),
            At::Awaiting => return self.await_verdict(state),
            At::Settling(verdict) => self.settle(state, verdict),
        }
        true
    }

    /// Whether this process, which uses its mesh, has a reason to call dm_recover: a process of the
    /// mesh is lost, or a rank has come to a later decision. The loss of a spare is no reason.
    fn must_recover(&self, state: &State) -> bool {
        let mine = state.process(self.number);
        let later = &state.store.told[usize::from(mine.epoch) + 1..];
        let is_told = !self.job.has(Mistake::EndTellsNobody) && later.contains(&true);
        mine.plan.used & state.store.lost != 0 || is_told
    }

    /// Calls dm_recover: the process ends its part of the epoch, and goes to the next decision.
    pub(crate) fn call(&self, state: &mut State) {
        let next = match state.process(self.number).at {
            At::Failed(number, _) => number + 1,
            _ => state.process(self.number).epoch + 1,
        };
        self.go_to(state, next);
    }

    fn go_to(&self, state: &mut State, number: u8) {
        // Where all options are equal, only the first rank's comparison changes anything.
        let is_first = state.store.options[usize::from(number)].is_none();
        // A newcomer has no options until it has left dm_init. Those of the others count for it.
        let has_options = self.is_in_mesh(state) && !state.process(self.number).is_new;
        let compares = (self.job.odd.is_some() || self.job.ends > 0 || is_first) && has_options;
        state.process_mut(self.number).at = if compares { At::Comparing(number) } else { At::Coming(number) };
    }

    /// Whether this process is in the mesh of its epoch. A spare or benched process is not: it
    /// waits for a place, and demands nothing.
    pub(crate) fn is_in_mesh(&self, state: &State) -> bool {
        state.process(self.number).plan.used & self.me() != 0
    }

    /// Compares this rank's options with those of the first rank that came.
    fn compare(&self, state: &mut State, number: u8) {
        let mine = (self.job.odd == Some(self.number), state.process(self.number).asks_end);
        let is_first = state.store.options[usize::from(number)].is_none();
        let theirs = *state.store.options[usize::from(number)].get_or_insert(mine);
        state.process_mut(self.number).at = match theirs == mine || self.job.has(Mistake::OptionsIgnored) {
            true if is_first => At::Telling(number),
            true => At::Coming(number),
            false => At::Proposing(number, Decision::Failure(Why::Mismatch)),
        };
    }

    /// Notes that this process is here, and whether it has the state.
    fn come(&self, state: &mut State, number: u8) {
        let at = self.notes(number);
        let assumed = self.job.has(Mistake::StateAssumed) && self.is_in_mesh(state);
        let has_state = state.process(self.number).has_state || assumed;
        state.store.here[at] |= self.me();
        state.store.stateful[at] |= if has_state { self.me() } else { 0 };
        if state.store.owner[usize::from(number)] == NOBODY && self.job.has(Mistake::OneProposer) {
            state.store.owner[usize::from(number)] = self.number;
        }
        let looks_once = self.job.has(Mistake::LossWakesNobody);
        let mine = state.process_mut(self.number);
        (mine.at, mine.came) = (At::Looking(number), number);
        if looks_once && !self.look(state, number) {
            state.process_mut(self.number).at = At::Reading(number);
        }
    }

    /// The place of the notes for that decision.
    fn notes(&self, number: u8) -> usize {
        if self.job.has(Mistake::NoNumberInKeys) { 0 } else { usize::from(number) }
    }

    /// Returns the processes of this process's mesh that are neither here nor known to be lost.
    /// Nobody waits for spares and benched ranks: one that is hung must not hold up the others.
    pub(crate) fn absent(&self, state: &State, number: u8) -> Set {
        let arrived = state.store.here[self.notes(number)] | state.store.lost;
        let Plan { members, used, .. } = state.process(self.number).plan;
        let awaited = if self.job.has(Mistake::SparesAwaited) { members } else { used };
        awaited & !arrived
    }

    /// Looks whether the decision stands, and otherwise whether it can be made. Returns `false`
    /// while neither is so. A process that looks is woken by the decision, by a process that
    /// comes, and by a loss. The first rank that came may have died, or hang, before it told the
    /// others. So a rank of the mesh that waits tells them where nobody has.
    fn look(&self, state: &mut State, number: u8) -> bool {
        let slot = usize::from(number);
        let all_are_here = self.absent(state, number) == 0 || self.job.has(Mistake::AwaitsNobody);
        let may_propose = !self.job.has(Mistake::OneProposer) || state.store.owner[slot] == self.number;
        if let Some(decision) = state.store.decisions[slot] {
            self.act(state, number, decision);
        } else if state.store.lost & self.me() != 0 {
            state.process_mut(self.number).at = At::Fenced;
        } else if all_are_here && may_propose {
            let decision = self.proposal(state, number);
            state.process_mut(self.number).at = At::Proposing(number, decision);
        } else if self.must_tell(state, number) {
            state.store.told[slot] = true;
        } else {
            return false;
        }
        true
    }

    /// Whether this process tells the others that it has come, because nobody has told them. A
    /// process that is not in the mesh starts nothing.
    fn must_tell(&self, state: &State, number: u8) -> bool {
        let is_told = state.store.told[usize::from(number)];
        self.is_in_mesh(state) && !is_told && !self.job.has(Mistake::FirstAloneTells)
    }

    /// The deadline of this process passes while it waits for other ranks. Returns `false` when it
    /// does not wait for ranks, or has no deadline.
    pub(crate) fn pass_deadline(&self, state: &mut State) -> bool {
        let at = state.process(self.number).at;
        let waits = match at {
            At::Looking(number) => {
                self.is_in_mesh(state)
                    && self.absent(state, number) != 0
                    && state.store.decisions[usize::from(number)].is_none()
            }
            At::Awaiting => self.is_in_mesh(state) && !self.verdict_is_due(state),
            _ => false,
        };
        if waits {
            state.process_mut(self.number).at = match (at, self.job.silent) {
                (At::Looking(number), Silent::Fails) => At::Proposing(number, Decision::Failure(Why::Timeout)),
                (At::Looking(number), Silent::LeftOut) => At::Proposing(number, self.proposal(state, number)),
                _ => At::Settling(Verdict::Late),
            };
        }
        waits
    }

    /// Returns what this process proposes, by what it sees now: the ranks that are here and not
    /// lost, in their seats; newcomers in the empty seats that they ask for; spares in those that
    /// are still empty. A newcomer whose seat another rank has, or which asks for none, is a spare
    /// from now on. Spares and benched ranks that are not here stay what they are.
    fn proposal(&self, state: &State, number: u8) -> Decision {
        let (store, mine) = (&state.store, state.process(self.number));
        let epoch = &mine.plan;
        let here = epoch.members & store.here[self.notes(number)] & !store.lost;
        let members = epoch.members & !store.lost & (here | !epoch.used);
        let keep = |holder: u8| if holder != NOBODY && members & one(holder) != 0 { holder } else { NOBODY };
        // A newcomer is refused once the holder of its seat has made an epoch that found the seat
        // taken. Until the newcomer has read so, no decision may let it in.
        let is_made = store.verdicts[usize::from(mine.epoch)] == Some(Verdict::Made);
        let forgets = self.job.has(Mistake::RefusalForgotten);
        let refused = epoch.refused | if is_made && !forgets { epoch.taken } else { 0 };
        // A newcomer that asks for another mesh is refused at once, because that is so for ever.
        let misfit = self.job.misfit.filter(|_| !self.job.has(Mistake::ShapeIgnored)).map_or(0, one);
        let refused = (refused | misfit & store.door) & !store.lost;
        let mut plan = Plan { members, used: 0, taken: 0, refused, mesh: epoch.mesh.map(keep) };
        let waits = store.door & !store.lost & !epoch.members & !refused;
        let claims = (0..self.job.processes()).filter_map(|number| {
            let name = Rank { job: self.job, number }.name();
            let seat = self.job.claim(number).filter(|_| waits & one(name) != 0)?;
            Some((name, usize::from(seat)))
        });
        let mut ready = here;
        let has_rank = |set: Set, name: u8| {
            let is_other = |other: u8| other != name && set & one(other) != 0;
            (0..self.job.processes()).any(|other| is_other(other) && self.job.rank(other) == self.job.rank(name))
        };
        for (name, seat) in claims.clone() {
            if has_rank(plan.members, name) && !self.job.has(Mistake::DoorForAll) {
                continue;
            }
            let is_taken = seat >= plan.mesh.len() || plan.mesh[seat] != NOBODY;
            if is_taken && !self.job.has(Mistake::DoorForAll) {
                (plan.members, ready) = (plan.members | one(name), ready | one(name));
                continue;
            }
            if plan.mesh[seat] != NOBODY {
                plan.members &= !one(plan.mesh[seat]);
            }
            plan.mesh[seat] = name;
            (plan.members, ready) = (plan.members | one(name), ready | one(name));
        }
        self.seat_spares(&mut plan, ready);
        // A newcomer that is left out stands at the door still. It must not come back, because it
        // may be hung: the others would wait for it in every second epoch.
        let left_out = if self.job.has(Mistake::LeftOutReturns) { 0 } else { epoch.members & !plan.members };
        plan.refused |= left_out & store.door & !store.lost;
        let is_whole = |replica: &&[u8]| replica.iter().all(|holder| *holder != NOBODY && ready & one(*holder) != 0);
        let whole = plan.mesh.chunks_exact(usize::from(self.job.replica)).filter(is_whole);
        plan.used = whole.flatten().fold(0, |set, holder| set | one(*holder));
        let is_taken = |name: u8| plan.members & one(name) == 0 && has_rank(plan.used, name);
        plan.taken = claims.filter(|(name, _)| is_taken(*name)).fold(0, |set, (name, _)| set | one(name));

        let asks_end = store.options[usize::from(number)].is_some_and(|(_, asks_end)| asks_end);
        let size = plan.used.count_ones();
        let decision = if epoch.used & here == 0 {
            // Only spares and benched ranks are left. They have not trained last.
            Decision::Failure(Why::NoState)
        } else if asks_end {
            Decision::End
        } else if !epoch.keeps_state(self.job, store.stateful[self.notes(number)] & here) {
            // Whoever else may come does not have the state.
            Decision::Failure(Why::NoState)
        } else if size == 0 || size < u32::from(self.job.least * self.job.replica) {
            Decision::Failure(Why::TooFew)
        } else if !plan.keeps_state(self.job, store.stateful[self.notes(number)]) {
            Decision::Failure(Why::NoState)
        } else {
            Decision::Epoch(plan)
        };
        if self.job.mistake.is_none() {
            let (at, epoch) = (self.notes(number), *epoch);
            let (here, stateful) = (store.here[at], store.stateful[at]);
            let view = View { epoch, is_made, here, stateful, lost: store.lost, door: store.door, asks_end };
            library::compare(self.job, &view, &decision);
        }
        decision
    }

    /// Gives the spares that are ready seats in those replicas that they make whole. The replicas
    /// that need the fewest come first, so as many replicas as possible are whole. `ready` are the
    /// processes that can be in the mesh.
    fn seat_spares(&self, plan: &mut Plan, ready: Set) {
        let size = usize::from(self.job.replica);
        let old_shape = usize::from(self.job.seats) / size;
        let mut replicas: Vec<usize> = (0..old_shape).collect();
        let empty = |plan: &Plan, replica: usize| {
            plan.mesh[replica * size..][..size].iter().filter(|holder| **holder == NOBODY).count()
        };
        let is_wasteful = self.job.has(Mistake::SparesWasted);
        if !is_wasteful {
            let is_ready = |holder: &u8| *holder == NOBODY || ready & one(*holder) != 0;
            replicas.retain(|replica| plan.mesh[replica * size..][..size].iter().all(is_ready));
            replicas.sort_by_key(|replica| empty(plan, *replica));
        }
        for replica in replicas {
            let mut spares: Vec<u8> = (0..self.job.processes()).collect();
            spares.retain(|other| ready & one(*other) & !plan.holders() != 0);
            spares.sort_by_key(|other| (self.job.rank(*other), *other));
            let taken: Vec<u8> = spares.into_iter().take(empty(plan, replica)).collect();
            if taken.len() == empty(plan, replica) || is_wasteful {
                let seats = plan.mesh[replica * size..][..size].iter_mut();
                let empty_seats = seats.filter(|holder| **holder == NOBODY);
                empty_seats.zip(taken).for_each(|(seat, spare)| *seat = spare);
            }
        }
    }

    /// Writes the proposal by compare-and-set, and acts on the decision that stands then. Before,
    /// it tells the ranks that have not come, where nobody has: the proposer ends its part of the
    /// mesh, whatever is decided.
    fn propose(&self, state: &mut State, number: u8, mut decision: Decision) {
        let slot = usize::from(number);
        if self.must_tell(state, number) {
            state.store.told[slot] = true;
            return;
        }
        if self.job.has(Mistake::DecidesInTwoSteps) {
            let is_first = state.store.owner[slot] == NOBODY;
            if is_first {
                state.store.owner[slot] = self.number;
            }
            state.process_mut(self.number).at =
                if is_first { At::Writing(number, decision) } else { At::Reading(number) };
            return;
        }
        match self.job.has(Mistake::PlainWrite) {
            true => state.store.decisions[slot] = Some(decision),
            false => decision = *state.store.decisions[slot].get_or_insert(decision),
        }
        self.act(state, number, decision);
    }

    fn write(&self, state: &mut State, number: u8, decision: Decision) {
        state.store.decisions[usize::from(number)] = Some(decision);
        self.act(state, number, decision);
    }

    /// Acts on a decision, which this process has read.
    fn act(&self, state: &mut State, number: u8, decision: Decision) {
        let is_spare = !self.is_in_mesh(state);
        match decision {
            Decision::Epoch(plan) if plan.members & self.me() != 0 || self.job.has(Mistake::NoFence) => {
                self.enter(state, number, plan);
            }
            Decision::Epoch(_) => state.process_mut(self.number).at = At::Fenced,
            Decision::End => state.process_mut(self.number).at = At::Ended,
            // A spare goes on waiting, unless the job is over.
            Decision::Failure(why) if is_spare && why != Why::NoState => self.go_to(state, number + 1),
            Decision::Failure(why) => state.process_mut(self.number).at = At::Failed(number, why),
        }
    }

    /// Whether this newcomer, which waits for that decision, need not wait any more: no member of
    /// the newest epoch is left, or the newcomer itself counts as lost.
    pub(crate) fn waits_in_vain(&self, state: &State, number: u8) -> bool {
        let plans = state.store.decisions[..usize::from(number)].iter().rev();
        let newest = plans.flatten().find_map(|decision| match decision {
            Decision::Epoch(plan) => Some(*plan),
            _ => None,
        });
        let Plan { members, .. } = newest.unwrap_or_else(|| Plan::at_start(self.job));
        (members & !state.store.lost == 0 || state.store.lost & self.me() != 0) && !self.job.has(Mistake::NoTickets)
    }

    /// Acts on a decision that a newcomer has read. A decision that says nothing of the newcomer is
    /// none of its business: it waits for the next one.
    fn read_at_the_door(&self, state: &mut State, number: u8, decision: Decision) {
        match decision {
            Decision::Epoch(plan) if plan.members & self.me() != 0 => self.enter(state, number, plan),
            Decision::Epoch(plan) if plan.taken & self.me() != 0 => {
                state.process_mut(self.number).at = At::Doubting(number);
            }
            // The newcomer asks for another mesh.
            Decision::Epoch(plan) if plan.refused & self.me() != 0 => {
                state.process_mut(self.number).at = At::Refused;
            }
            Decision::End | Decision::Failure(Why::NoState) => {
                state.process_mut(self.number).at = At::Refused;
            }
            _ => state.process_mut(self.number).at = At::Door(number + 1),
        }
    }

    /// Becomes a member of an epoch, and makes this process's part of its mesh.
    fn enter(&self, state: &mut State, number: u8, plan: Plan) {
        let is_used = plan.used & self.me() != 0 || plan.members & self.me() == 0;
        let mine = state.process_mut(self.number);
        (mine.epoch, mine.plan) = (number, plan);
        mine.at = if is_used { At::Meeting } else { At::Awaiting };
    }

    fn meet(&self, state: &mut State) {
        let number = usize::from(state.process(self.number).epoch);
        state.store.met[number] |= self.me();
        state.process_mut(self.number).at = At::Awaiting;
    }

    /// Whether this process can go on: the verdict stands, or all of the mesh have met, or one of
    /// them is lost.
    fn verdict_is_due(&self, state: &State) -> bool {
        let Plan { used, .. } = state.process(self.number).plan;
        let number = usize::from(state.process(self.number).epoch);
        state.store.verdicts[number].is_some() || used & !state.store.met[number] == 0 || used & state.store.lost != 0
    }

    fn await_verdict(&self, state: &mut State) -> bool {
        let Plan { used, .. } = state.process(self.number).plan;
        let number = usize::from(state.process(self.number).epoch);
        if !self.verdict_is_due(state) {
            return false;
        }
        match state.store.verdicts[number] {
            Some(verdict) => self.leave(state, verdict),
            None => {
                let all_have_met = used & !state.store.met[number] == 0;
                let verdict = if all_have_met { Verdict::Made } else { Verdict::Broken };
                state.process_mut(self.number).at = At::Settling(verdict);
            }
        }
        true
    }

    /// Writes the verdict by compare-and-set, and acts on the one that stands then.
    fn settle(&self, state: &mut State, verdict: Verdict) {
        let number = usize::from(state.process(self.number).epoch);
        let stands = *state.store.verdicts[number].get_or_insert(verdict);
        if stands == Verdict::Made {
            self.clean_up(state, number);
        }
        let own = self.job.has(Mistake::OwnVerdict);
        self.leave(state, if own { verdict } else { stands });
    }

    /// Removes the keys of the ended epochs. Decisions and verdicts stay for as long as the job
    /// lives: they are what a rank finds that comes back.
    fn clean_up(&self, state: &mut State, number: usize) {
        let store = &mut state.store;
        let from = usize::from(self.job.has(Mistake::NoNumberInKeys));
        for past in from..=number {
            (store.here[past], store.stateful[past]) = (0, 0);
            (store.met[past], store.options[past]) = (0, None);
            if self.job.has(Mistake::DecisionsForgotten) {
                store.decisions[past] = None;
            }
        }
    }

    /// Acts on the verdict on the mesh of this process's epoch.
    fn leave(&self, state: &mut State, verdict: Verdict) {
        let number = state.process(self.number).epoch;
        if verdict == Verdict::Made && !self.is_in_mesh(state) {
            // The others train without this process from now on.
            state.process_mut(self.number).has_state = false;
        }
        match verdict {
            Verdict::Made if self.is_in_mesh(state) => {
                let mine = state.process_mut(self.number);
                (mine.at, mine.is_new) = (At::Training, false);
            }
            Verdict::Late if self.is_in_mesh(state) => {
                state.process_mut(self.number).at = At::Failed(number, Why::Late);
            }
            // Something was lost meanwhile, or this process is still a spare: it is here for the
            // next decision.
            Verdict::Made | Verdict::Late | Verdict::Broken => self.go_to(state, number + 1),
        }
    }
}
