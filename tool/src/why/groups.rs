//! The groups of a job: for each dimension and agreement scope, who is at which call.

use std::collections::BTreeMap;

use recording::{ChannelState, EntryState, RecordedCall, RecordedChannel};

use super::job::{Job, MOST_RANKS, Seen};
use super::process::{AGREEMENTS, Process};

/// The most members that are not seen, of all groups of a job together. Each group of a recording
/// may say any size, and each member takes memory.
const MOST_MEMBERS: usize = 1 << 22;

/// A group of ranks that make calls together.
pub struct Group<'a> {
    /// The name: a mesh and its dimension as `mesh/dp`, or an agreement scope.
    pub name: &'a str,
    /// Whether it is an agreement scope.
    pub is_scope: bool,
    /// The members, in the order of their ranks in the group. Where the limit on all members is
    /// reached, some members that are not seen are missing.
    pub members: Vec<Member<'a>>,
}

/// A member of a group.
pub struct Member<'a> {
    /// The member's rank in the group.
    pub in_group: u32,
    /// The place of the rank in the job. `None` where nobody knows which rank it is.
    pub rank: Option<usize>,
    /// The rank's part in the group, where it has a recording with the group.
    pub seat: Option<Seat<'a>>,
}

/// A rank's part in a group.
#[derive(Clone, Copy)]
pub struct Seat<'a> {
    /// The rank's process.
    pub process: &'a Process,
    /// The group in the process's recording.
    pub channel: &'a RecordedChannel,
}

impl<'a> Seat<'a> {
    /// The collective call of that number, where the ring still has it.
    pub fn call(&self, number: u64) -> Option<&'a RecordedCall> {
        let mut calls = self.collective_calls().rev();
        calls.find(|call| call.in_channel <= number).filter(|call| call.in_channel == number)
    }

    /// The collective calls that the ring still has.
    pub fn collective_calls(&self) -> impl DoubleEndedIterator<Item = &'a RecordedCall> {
        self.calls().filter(|call| call.call.operation.is_compared())
    }

    /// The calls, messages and operations of the program's own that the ring still has.
    pub fn calls(&self) -> impl DoubleEndedIterator<Item = &'a RecordedCall> {
        self.process.snapshot.calls_of(self.channel)
    }

    /// The last collective call that was begun.
    pub fn last(&self) -> Option<&'a RecordedCall> {
        self.call(self.channel.calls_begun)
    }

    /// Whether the group has ended for this rank.
    pub fn is_closed(&self) -> bool {
        self.channel.state == ChannelState::Closed
    }

    /// The calls in which the rank may wait: those that run, and the last one that was handed to a
    /// stream. A call that has failed counts, too, where the process has called nothing since.
    pub fn pending(&self) -> Vec<&'a RecordedCall> {
        let last_of_all = self.process.snapshot.calls.last().map(|call| call.number);
        let last = self.last().filter(|call| call.state == EntryState::Issued);
        let is_pending = |call: &&RecordedCall| match call.state {
            EntryState::Running => true,
            EntryState::Failed => Some(call.number) == last_of_all,
            _ => false,
        };
        self.calls().filter(is_pending).chain(last).collect()
    }

    /// A call in words: "all-reduce 641" or "dm_flatten(dp, tp)". Where the ring has lost the call,
    /// it is "call 641".
    pub fn short(&self, number: u64) -> String {
        match self.call(number) {
            Some(call) => self.short_of(call),
            None => format!("call {number}"),
        }
    }

    /// A call or a message in words.
    pub fn short_of(&self, call: &RecordedCall) -> String {
        if let Some(text) = self.process.snapshot.text(call).filter(|text| !text.is_empty()) {
            return devicemesh::printable::printable(text).into_owned();
        }
        format!("{} {}", call.call.operation.name(), call.in_channel)
    }
}

impl<'a> Group<'a> {
    /// The member with that rank in the group.
    pub fn member(&self, in_group: usize) -> Option<&Member<'a>> {
        let at = self.members.binary_search_by_key(&in_group, |member| member.in_group as usize);
        at.ok().map(|at| &self.members[at])
    }

    /// The different calls of that number, each with one rank's part and the ranks that make it.
    /// The fewest ranks come first.
    pub fn calls(&self, number: u64) -> Vec<((Seat<'a>, &'a RecordedCall), Vec<usize>)> {
        let mut parts: BTreeMap<u64, ((Seat, &RecordedCall), Vec<usize>)> = BTreeMap::new();
        for member in &self.members {
            let (Some(rank), Some(seat)) = (member.rank, member.seat) else { continue };
            let Some(call) = seat.call(number) else { continue };
            parts.entry(call.digest).or_insert(((seat, call), Vec::new())).1.push(rank);
        }
        let mut parts: Vec<_> = parts.into_values().collect();
        parts.sort_by_key(|(_, ranks)| (ranks.len(), ranks.clone()));
        parts
    }
}

/// The groups of a job, the dimensions first. A group that has ended for all of its ranks is left
/// out.
pub fn groups(job: &Job) -> Vec<Group<'_>> {
    groups_within(job, MOST_MEMBERS)
}

/// The groups. All of them together have at most `left` members that are not seen, and one more for
/// each group.
fn groups_within(job: &Job, mut left: usize) -> Vec<Group<'_>> {
    let mut found: BTreeMap<(u8, u64), Vec<(usize, Seat)>> = BTreeMap::new();
    for (at, rank) in job.ranks.iter().enumerate() {
        let Seen::Recorded(process) = &rank.seen else { continue };
        for channel in &process.snapshot.channels {
            found.entry((channel.kind, channel.key)).or_default().push((at, Seat { process, channel }));
        }
    }
    let is_open = |seats: &Vec<(usize, Seat)>| seats.iter().any(|(_, seat)| !seat.is_closed());
    let mut groups = Vec::new();
    for seats in found.into_values().filter(is_open) {
        let size = seats.iter().map(|(_, seat)| seat.channel.size as usize).max().unwrap_or(0);
        let group = group(job, &seats, size.min(MOST_RANKS), left);
        let unseen = group.members.iter().filter(|member| member.seat.is_none()).count();
        left = left.saturating_sub(unseen);
        groups.push(group);
    }
    groups.sort_by_key(|group| {
        let first = group.members.iter().filter_map(|member| member.rank).min();
        (group.is_scope, group.name, first)
    });
    groups
}

/// The group of these seats. It has all members that are seen. From the other members of the `size`
/// it has at most `left`, but at least one, so that the seen members do not look like the whole
/// group.
fn group<'a>(job: &Job, seats: &[(usize, Seat<'a>)], size: usize, left: usize) -> Group<'a> {
    let (_, any) = seats[0];
    // A later world may have overwritten this world in the recording of a rank that has left it. So
    // all seats are searched.
    let world = seats.iter().find_map(|(_, seat)| seat.process.snapshot.world_of(seat.channel)).map(|it| it.key);
    let known = seats.iter().map(|(_, seat)| &seat.channel.members).find(|members| !members.is_empty());
    let rank_of = |member: u32| match (known, world) {
        // Ranks that join a world are numbered by their launcher.
        (Some(members), None) => job.rank_with_number(*members.get(member as usize)?),
        (Some(members), Some(world)) => job.rank_of(world, *members.get(member as usize)?),
        // The members of a group that has as many ranks as its world are those of the world.
        (None, Some(world)) if size == job.ranks.len() => job.rank_of(world, member),
        _ => None,
    };
    // A rank may have opened a group again that has the key of an ended one.
    let order = |seat: &Seat| (!seat.is_closed(), seat.channel.first_call);
    let mut taken: BTreeMap<u32, (usize, Seat<'a>)> = BTreeMap::new();
    for (rank, seat) in seats {
        let is_older = taken.get(&seat.channel.rank).is_some_and(|(_, other)| order(other) > order(seat));
        if !is_older {
            taken.insert(seat.channel.rank, (*rank, *seat));
        }
    }
    let unseen = (0..size as u32).filter(|member| !taken.contains_key(member)).take(left.max(1));
    let unseen = unseen.map(|in_group| Member { in_group, rank: rank_of(in_group), seat: None });
    let seen = |(in_group, (rank, seat)): (&u32, &(usize, Seat<'a>))| Member {
        in_group: *in_group,
        rank: Some(*rank),
        seat: Some(*seat),
    };
    let mut members: Vec<Member> = unseen.chain(taken.iter().map(seen)).collect();
    members.sort_unstable_by_key(|member| member.in_group);
    Group { name: &any.channel.name, is_scope: any.channel.kind == AGREEMENTS, members }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::find::Found;
    use super::super::job::jobs;
    use super::super::judge_tests::a_rank_behind;
    use super::*;

    /// A recording may claim any size for each of its 256 groups.
    #[test]
    fn all_groups_together_have_a_limit() {
        // Rank 0 is not seen, so ranks that are seen stand behind it in their groups.
        let mut processes: Vec<Process> = a_rank_behind().iter().skip(1).map(|rank| rank.process()).collect();
        processes
            .iter_mut()
            .flat_map(|process| &mut process.snapshot.channels)
            .for_each(|channel| channel.size = 1 << 30);
        let jobs = jobs(Found { processes, ..Found::default() });
        let groups = groups_within(&jobs[0], 1000);
        let unseen = |group: &Group| group.members.iter().filter(|member| member.seat.is_none()).count();
        let unseen: Vec<usize> = groups.iter().map(unseen).collect();
        assert!(unseen.len() == 7 && unseen.iter().sum::<usize>() < 1000 + 7, "{unseen:?}");
        // The others must not look like all of the group.
        assert!(unseen.iter().all(|unseen| *unseen > 0), "{unseen:?}");
        // Every rank that is seen is there, also the last one of a group.
        let seat = |channel: &RecordedChannel| (channel.kind, channel.key, channel.rank);
        let seen = groups.iter().flat_map(|group| &group.members).filter_map(|member| member.seat);
        let seen: BTreeSet<(u8, u64, u32)> = seen.map(|found| seat(found.channel)).collect();
        let processes = jobs[0].ranks.iter().filter_map(|rank| rank.process());
        let recorded = processes.flat_map(|process| &process.snapshot.channels).map(seat).collect();
        assert_eq!(seen, recorded);
        for group in &groups {
            for seat in group.members.iter().filter_map(|member| member.seat) {
                let member = group.member(seat.channel.rank as usize).and_then(|member| member.seat);
                assert!(member.is_some_and(|member| std::ptr::eq(member.channel, seat.channel)));
            }
        }
    }
}
