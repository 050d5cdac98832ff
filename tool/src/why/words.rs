//! The sentences about what is wrong.

use devicemesh::ccl::DATA_TYPES;
use devicemesh::printable::printable;
use recording::{EntryState, Operation, RecordedCall};

use super::find::Node;
use super::groups::{Group, Seat};
use super::job::Seen;
use super::judge::{Finding, Kind, Verdict};
use super::process::{Process, State};
use crate::words::{count, listed, ranges};

/// The most ranges of ranks that a sentence names.
const MOST_RANGES: usize = 8;
/// The names of the reductions, by their `ncclRedOp_t` numbers.
const REDUCTIONS: [&str; 5] = ["sum", "prod", "max", "min", "avg"];

/// A time in words: "0.4 s", "12 s", "3 min 20 s", "2 h 5 min".
pub fn time(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..10 => format!("{seconds:.1} s"),
        10..120 => format!("{whole} s"),
        120..7200 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

/// What a call does, without its number: "all-reduce of 4 float32 (sum)".
pub fn content(seat: &Seat<'_>, call: &RecordedCall, group: &Group<'_>, verdict: &Verdict<'_>) -> String {
    let operation = call.call.operation;
    if let Some(text) = seat.process.snapshot.text(call).filter(|text| !text.is_empty()) {
        return printable(text).into_owned();
    }
    if matches!(operation, Operation::Agreement | Operation::Barrier | Operation::StoreBytes | Operation::MakeComms) {
        return operation.name().to_owned();
    }
    let member = usize::try_from(call.call.peer).ok().and_then(|peer| group.member(peer)?.rank);
    let peer = member.map(|rank| format!("rank {}", verdict.job.ranks[rank].number));
    let peer = match (operation, peer) {
        (Operation::Send | Operation::Reduce | Operation::Gather, Some(peer)) => format!(" to {peer}"),
        (Operation::Recv | Operation::Broadcast | Operation::Scatter, Some(peer)) => format!(" from {peer}"),
        _ => String::new(),
    };
    let dtype = DATA_TYPES.get(usize::from(call.call.dtype)).map_or("elements", |(name, _)| name);
    let is_reduction = matches!(operation, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter);
    let reduction = REDUCTIONS.get(usize::from(call.call.reduction)).filter(|_| is_reduction);
    let reduction = reduction.map_or(String::new(), |name| format!(" ({name})"));
    format!("{} of {} {dtype}{reduction}{peer}", operation.name(), call.call.count)
}

impl Verdict<'_> {
    /// Ranks in words: "rank 3", "ranks 0-2, 5".
    pub fn ranks(&self, ranks: &[usize]) -> String {
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{word} {}", self.numbers(ranks))
    }

    /// The numbers of ranks: "0-2, 5".
    pub fn numbers(&self, ranks: &[usize]) -> String {
        let mut numbers: Vec<usize> = ranks.iter().map(|rank| self.job.ranks[*rank].number as usize).collect();
        numbers.sort_unstable();
        listed(ranges(numbers), MOST_RANGES)
    }

    /// Whether it is the group in which ranks join a world.
    fn is_join(&self, group: usize) -> bool {
        let group = &self.groups[group];
        let mut seats = group.members.iter().filter_map(|member| member.seat);
        group.is_scope && seats.all(|seat| seat.channel.world.is_none())
    }

    /// The ranks of a group.
    pub fn members(&self, group: usize) -> Vec<usize> {
        self.groups[group].members.iter().filter_map(|member| member.rank).collect()
    }

    /// The name of a group, with its ranks where it is not the whole job.
    pub fn group(&self, group: usize) -> String {
        let members = self.members(group);
        let name = printable(self.groups[group].name);
        match members.len() == self.job.ranks.len() || members.is_empty() {
            true => name.into_owned(),
            false => format!("{name} ({})", self.ranks(&members)),
        }
    }

    /// A call with its group: "all-reduce 641 of mesh/tp (ranks 4-7)".
    pub fn call(&self, group: usize, number: u64, seats: impl Iterator<Item = usize>) -> String {
        let mut seats = seats.filter_map(|wait| self.waits.get(wait)).map(|wait| wait.seat);
        let known = seats.find(|seat| seat.call(number).is_some());
        let short = known.map_or_else(|| format!("call {number}"), |seat| seat.short(number));
        self.in_group(group, &short)
    }

    /// The call of a wait.
    fn call_of(&self, wait: usize) -> String {
        let wait = &self.waits[wait];
        self.in_group(wait.group, &wait.seat.short_of(wait.call))
    }

    fn in_group(&self, group: usize, call: &str) -> String {
        // The text of an agreement names the function, which is enough.
        let is_clear = self.groups[group].is_scope && call.contains('(');
        if is_clear { call.to_owned() } else { format!("{call} of {}", self.group(group)) }
    }

    /// What is wrong with the job, in one sentence.
    pub fn headline(&self, after: f64) -> String {
        match self.findings.first() {
            Some(finding) => self.sentence(finding),
            None if self.job.is_over => "nothing was stuck: no rank waited in a call when the job ended".to_owned(),
            None => {
                let longest = self.waits.iter().filter(|wait| wait.call.state == EntryState::Running);
                let longest = longest.filter_map(|wait| wait.seconds).fold(0.0, f64::max);
                let longest =
                    if longest > 0.0 { format!("; the longest wait is {}", time(longest)) } else { String::new() };
                format!("nothing is stuck: no rank has waited for {}{longest}", time(after))
            }
        }
    }

    /// A finding as a sentence.
    pub fn sentence(&self, finding: &Finding) -> String {
        let Finding { kind, ranks, group, number, .. } = finding;
        let culprits = self.ranks(ranks);
        let has = if ranks.len() == 1 { "has" } else { "have" };
        let is = if ranks.len() == 1 { "is" } else { "are" };
        let other = self.other_of(finding);
        let call = match finding.waits.first() {
            Some(wait) if other.is_some() => self.call_of(*wait),
            _ => self.call(*group, *number, finding.waits.iter().copied()),
        };
        let where_waited = match finding.waits.first() {
            Some(wait) if self.waits[*wait].call.in_channel != *number => self.call_of(*wait),
            _ => "it".to_owned(),
        };
        let waiters = self.waiters(finding);
        let wait_in =
            |place: &str| format!("{waiters} {} in {place}{}", self.have_waited(finding), self.since(finding));
        let first = match kind {
            Kind::Behind => format!("{culprits} {has} not called {call}; {}", wait_in(&where_waited)),
            // Before the world is there, nobody knows whether the ranks have been started.
            Kind::Gone if self.is_join(*group) => {
                let wait = wait_in(&call);
                format!("{culprits} {has} no process here: not started yet, or ended; {wait}")
            }
            Kind::Gone => format!("{culprits} {has} died: {}; {}", gone(ranks.len()), wait_in(&call)),
            Kind::Stopped => format!("{culprits} {is} stopped{}; {}", self.stopped_by(ranks), wait_in(&call)),
            Kind::Differs => self.difference(finding),
            Kind::Crossed => self.crossing(finding),
            Kind::Queued if self.message_of(finding).is_some() => self.queued_message(finding, &culprits, has),
            Kind::Queued => {
                format!(
                    "{culprits} {has} put {call} into a group of calls and {has} not ended the group; {}",
                    wait_in("it")
                )
            }
            Kind::Failed => format!("{call} has failed on {culprits}; {}", wait_in("it")),
            Kind::Left => format!("{culprits} {has} left {}; {}", self.group(*group), wait_in(&call)),
            Kind::NoGroup => format!("{culprits} {has} not made {}; {}", self.group(*group), wait_in(&call)),
            Kind::NotJoined if self.is_join(*group) => {
                format!("{culprits} {has} not joined the world; {}", wait_in(&call))
            }
            // All ranks of a world have joined it. So the process that runs is another one.
            Kind::NotJoined => {
                let (process, its) = if ranks.len() == 1 { ("a process", "its") } else { ("processes", "their") };
                let wait = wait_in(&call);
                format!(
                    "{culprits} {has} {process} outside the world: {its} earlier one has ended, or records nothing; {wait}"
                )
            }
            Kind::NoMessage => self.message(finding, &culprits),
            Kind::AllFailed => format!("{call} has failed on {culprits}, and no rank is missing"),
            Kind::Slow => {
                let all = if ranks.len() == self.groups[*group].members.len() { "all of " } else { "" };
                let since = self.since(finding);
                let why = match other {
                    Some(Operation::Custom) => ": nobody knows for which ranks it waits",
                    _ => ", and no rank is missing: the call moves data, or the network is stuck",
                };
                format!("{all}{culprits} {has} been in {call}{since}{why}")
            }
            Kind::Elsewhere => self.elsewhere(finding, &culprits, &call),
        };
        let direct = self.direct(finding).len();
        let further = finding.victims.saturating_sub(direct);
        match (kind, further) {
            (_, 0) | (Kind::Differs | Kind::Crossed, _) => first,
            _ => format!("{first}; {} for these in other groups", waits(further)),
        }
    }

    /// The ranks that wait directly.
    fn direct(&self, finding: &Finding) -> Vec<usize> {
        let mut direct: Vec<usize> = finding.waits.iter().map(|wait| self.waits[*wait].rank).collect();
        direct.sort_unstable();
        direct.dedup();
        direct.retain(|rank| !finding.ranks.contains(rank));
        direct
    }

    fn waiters(&self, finding: &Finding) -> String {
        let direct = self.direct(finding);
        let all = self.members(finding.group).len();
        match direct.len() + finding.ranks.len() == all && direct.len() > 1 {
            true => format!("the other {} ranks", direct.len()),
            false => self.ranks(&direct),
        }
    }

    fn have_waited(&self, finding: &Finding) -> &'static str {
        let has_failed = finding.waits.iter().all(|wait| self.waits[*wait].call.state == EntryState::Failed);
        match (self.direct(finding).len(), has_failed, self.job.is_over) {
            (1, false, false) => "has waited",
            (_, false, false) => "have waited",
            (_, false, true) => "waited",
            (_, true, _) => "failed",
        }
    }

    fn since(&self, finding: &Finding) -> String {
        let has_failed = finding.waits.iter().all(|wait| self.waits[*wait].call.state == EntryState::Failed);
        match finding.seconds.map(time) {
            Some(seconds) if has_failed => format!(" {seconds} ago"),
            Some(seconds) => format!(" for {seconds}"),
            None => String::new(),
        }
    }

    fn stopped_by(&self, ranks: &[usize]) -> String {
        let processes: Vec<&Process> = ranks.iter().filter_map(|rank| self.job.ranks[*rank].process()).collect();
        if processes.iter().any(|process| process.state == State::Traced) {
            return " by a debugger".to_owned();
        }
        let pids: Vec<String> = processes.iter().map(|process| process.pid.to_string()).collect();
        let mut hosts: Vec<&str> = processes.iter().map(|process| process.host()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let on = match processes.iter().all(|process| process.runs_here()) {
            true => String::new(),
            false => format!(" on {}", listed(hosts.iter().map(|host| printable(host)), MOST_RANGES)),
        };
        format!(
            " by a signal (`kill -CONT {}`{on} continues {})",
            pids.join(" "),
            if pids.len() == 1 { "it" } else { "them" }
        )
    }

    /// Who calls what. The fewest ranks are named first, because they are the likely cause.
    fn difference(&self, finding: &Finding) -> String {
        let group = &self.groups[finding.group];
        let calls = group.calls(finding.number).into_iter();
        let parts: Vec<(String, Vec<usize>)> =
            calls.map(|((seat, call), ranks)| (content(&seat, call, group, self), ranks)).collect();
        let name = self.group(finding.group);
        let clause = |(at, (content, ranks)): (usize, &(String, Vec<usize>))| {
            let verb = if ranks.len() == 1 { "calls" } else { "call" };
            let place = if at == 0 { format!(" as call {} of {name}", finding.number) } else { String::new() };
            let is_rest = at > 0 && parts.len() == 2 && ranks.len() > 1;
            let ranks = if is_rest { format!("the other {} ranks", ranks.len()) } else { self.ranks(ranks) };
            format!("{ranks} {verb} {content}{place}")
        };
        let clauses: Vec<String> = parts.iter().enumerate().map(clause).collect();
        clauses.join(", and ")
    }

    fn crossing(&self, finding: &Finding) -> String {
        let next = |at: usize| finding.ranks[(at + 1) % finding.ranks.len()];
        let clause = |(at, wait): (usize, &usize)| {
            let one = self.ranks(&[self.waits[*wait].rank]);
            format!("{one} waits in {} for {}", self.call_of(*wait), self.ranks(&[next(at)]))
        };
        let mut names: Vec<&str> = finding.waits.iter().map(|wait| self.groups[self.waits[*wait].group].name).collect();
        names.sort_unstable();
        names.dedup();
        let title = match names.len() {
            1 => "ranks wait for each other".to_owned(),
            2 => "two dimensions are crossed".to_owned(),
            several => format!("{several} dimensions are crossed"),
        };
        let mut clauses: Vec<String> = finding.waits.iter().enumerate().map(clause).collect();
        let last = clauses.pop().unwrap_or_default();
        let since = finding.seconds.map_or(String::new(), |seconds| format!(", for {}", time(seconds)));
        format!("{title}: {}, and {last}{since}", clauses.join(", "))
    }

    /// The operation in which the first wait of a finding waits, where this is a message or an
    /// operation of the program's own. `None` where the wait is in a collective call.
    fn other_of(&self, finding: &Finding) -> Option<Operation> {
        let operation = self.waits[*finding.waits.first()?].call.call.operation;
        (!operation.is_compared()).then_some(operation)
    }

    /// The operation of the message in which the first wait of a finding waits. `None` where the
    /// wait is in another call.
    fn message_of(&self, finding: &Finding) -> Option<Operation> {
        self.other_of(finding).filter(|operation| operation.is_message())
    }

    fn queued_message(&self, finding: &Finding, culprits: &str, has: &str) -> String {
        let half = if self.message_of(finding) == Some(Operation::Send) { Operation::Recv } else { Operation::Send };
        let (waiters, call) = (self.waiters(finding), self.call_of(finding.waits[0]));
        let wait = format!("{waiters} {} in {call}{}", self.have_waited(finding), self.since(finding));
        format!("{culprits} {has} put the {} into a group of calls and {has} not ended the group; {wait}", half.name())
    }

    fn message(&self, finding: &Finding, culprits: &str) -> String {
        let does = match (self.waits[finding.waits[0]].call.call.operation, finding.ranks.len()) {
            (Operation::Send, 1) => "does not receive",
            (Operation::Send, _) => "do not receive",
            (_, 1) => "does not send",
            _ => "do not send",
        };
        let (waiters, call) = (self.waiters(finding), self.call_of(finding.waits[0]));
        format!("{culprits} {does}; {waiters} {} in {call}{}", self.have_waited(finding), self.since(finding))
    }

    fn elsewhere(&self, finding: &Finding, culprits: &str, call: &str) -> String {
        let members = self.members(finding.group);
        let is_elsewhere = |rank: &usize| matches!(self.job.ranks[*rank].seen, Seen::Elsewhere);
        let others: Vec<usize> = members.into_iter().filter(is_elsewhere).collect();
        let has = if finding.ranks.len() == 1 { "has" } else { "have" };
        let others = match others.is_empty() {
            true => "ranks that are not seen here".to_owned(),
            false => format!(
                "{}, which {} {}",
                self.ranks(&others),
                if others.len() == 1 { "is" } else { "are" },
                self.unseen(&others)
            ),
        };
        format!("{culprits} {has} waited in {call}{} for {others}", self.since(finding))
    }

    /// The node of a rank, where it is known.
    fn node_of(&self, rank: usize) -> Option<&Node> {
        let number = self.job.ranks[rank].number;
        self.job.nodes.iter().find(|node| node.ranks.contains(&number))
    }

    /// Where ranks are not seen: "not seen on this host", "seen on none of the 3 hosts that
    /// answered", or "on node 2 (gamma), from where no answer came".
    fn unseen(&self, ranks: &[usize]) -> String {
        let mut silent: Vec<String> = Vec::new();
        for node in ranks.iter().filter_map(|rank| self.node_of(*rank)) {
            let name = printable(&node.name).into_owned();
            if node.silence.is_some() && !silent.contains(&name) {
                silent.push(name);
            }
        }
        let asked = self.job.nodes.iter().filter(|node| node.silence.is_none()).count();
        match (silent.is_empty(), asked) {
            (false, _) => format!("on {}, from where no answer came", listed(silent, MOST_RANGES)),
            (true, 0 | 1) => "not seen on this host".to_owned(),
            (true, hosts) => format!("seen on none of the {hosts} hosts that answered"),
        }
    }

    /// Where a rank is that others wait for.
    pub fn whereabouts(&self, rank: usize) -> String {
        let name = self.ranks(&[rank]);
        let process = match &self.job.ranks[rank].seen {
            Seen::Recorded(process) => process,
            Seen::Started(pid, host) => {
                let on = host.as_ref().map_or(String::new(), |host| format!(" on {}", printable(host)));
                return format!("{name} (pid {pid}{on}) runs and has not joined the world");
            }
            Seen::Gone => {
                return match self.node_of(rank) {
                    Some(node) => format!("{name} has no process on {}", printable(&node.name)),
                    None => format!("{name} has no process on this host"),
                };
            }
            Seen::Elsewhere => return format!("{name} is {}", self.unseen(&[rank])),
        };
        let host = printable(process.host());
        let at = format!("{name} (pid {} on {host})", process.pid);
        let does = match process.state {
            State::Computes => "computes",
            State::Sleeps => "sleeps",
            State::Blocked => "waits in the kernel",
            State::Stopped => "is stopped",
            State::Traced => "is stopped by a debugger",
            State::Gone => "is gone",
            State::Unknown => "has a recording",
        };
        format!("{at} {does}; {}", self.last_call(rank, process))
    }

    /// The call in which a process is, or its last one.
    fn last_call(&self, rank: usize, process: &Process) -> String {
        let own = self.waits.iter().enumerate().filter(|(_, wait)| wait.rank == rank);
        let running =
            own.filter(|(_, wait)| wait.call.state == EntryState::Running).max_by_key(|(_, wait)| wait.call.number);
        let ago = |ticks: u64| process.timeline.seconds_since(ticks).map_or(String::new(), time);
        if let Some((at, wait)) = running {
            return format!("it has been in {} for {}", self.call_of(at), ago(wait.call.begun));
        }
        let Some(call) = process.snapshot.calls.last() else { return "it has made no call".to_owned() };
        let is_in = |group: &&Group| {
            group.members.iter().any(|member| member.rank == Some(rank) && is_seat_of(member.seat, call))
        };
        let Some(at) = self.groups.iter().position(|group| is_in(&group)) else {
            return format!("its last call was in a group that has ended, {} ago", ago(call.begun));
        };
        let seat =
            self.groups[at].members.iter().filter(|member| member.rank == Some(rank)).find_map(|member| member.seat);
        let short = seat.map_or_else(String::new, |seat| seat.short_of(call));
        let name = self.in_group(at, &short);
        match (call.state, call.ended) {
            (EntryState::Queued, _) => {
                format!("its last call, {name}, is in a group of calls that it has not ended, for {}", ago(call.begun))
            }
            (EntryState::Failed, Some(ended)) => format!("its last call, {name}, failed {} ago", ago(ended)),
            (EntryState::Issued, _) => format!("its last call, {name}, was handed to a stream {} ago", ago(call.begun)),
            (_, Some(ended)) => format!("its last call, {name}, ended {} ago", ago(ended)),
            (_, None) => format!("its last call is {name}"),
        }
    }
}

fn is_seat_of(seat: Option<Seat<'_>>, call: &RecordedCall) -> bool {
    seat.is_some_and(|seat| seat.channel.place == call.channel && call.number >= seat.channel.first_call)
}

fn gone(processes: usize) -> &'static str {
    if processes == 1 { "its process is gone" } else { "their processes are gone" }
}

fn waits(ranks: usize) -> String {
    format!("{} {}", count(ranks, "more rank"), if ranks == 1 { "waits" } else { "wait" })
}
