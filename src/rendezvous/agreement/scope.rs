//! A set of ranks that make collective calls in the same order.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::deadlock::take_back_note;
use super::deciding::{self, Settled};
use super::departures::Departures;
use super::members::Members;
use super::round::{Membership, Round};
use super::sharing::NOTHING;
use super::verdict::{DETAIL, Verdict};
use crate::error::{Error, Result, Status};
use crate::recorder::{self, Group, Kind, Operation, RecordedAgreement};
use crate::wait::Wait;

/// A set of ranks that make collective calls in the same order.
pub struct Scope {
    /// The ranks, and the store.
    pub(super) membership: Arc<Membership>,
    /// The keys of the scope begin with this prefix.
    pub(super) prefix: String,
    /// How many calls were begun so far.
    pub(super) calls: Arc<AtomicU64>,
    /// Whether a call has ended because one of the ranks was lost. Then no later call can be
    /// agreed.
    pub(super) over: Arc<AtomicBool>,
    /// Whether the caller of this rank was told of a failed call, while the other ranks may have
    /// given up further calls for which this rank did not come. The next call of this rank then
    /// passes over the calls that the others gave up, and goes on where the others are (late.rs).
    pub(super) is_behind: Arc<AtomicBool>,
    /// How many of its own calls this rank has refused since it last took part in a call.
    refusals: Arc<AtomicU64>,
    /// The ranks that have ended the mesh of the scope's calls; `None` where the calls concern no
    /// mesh.
    departures: Option<Arc<Departures>>,
    /// The scope in the recording of this process, from its first call on.
    group: Arc<OnceLock<Group>>,
    /// The name of the scope in the recording, where it is not the name of its keys.
    label: Option<&'static str>,
}

/// The most refusals in a row that a rank tells the others. Each of them stays in the store until a
/// call is agreed, so a program that goes on refusing must not fill the store.
pub(super) const MOST_REFUSALS: u64 = 1000;

/// The most bytes of a call's text. A store takes values of 8 MiB, and a verdict may quote the
/// texts of four ranks.
const MOST_TEXT: usize = 1 << 20;

thread_local! {
    /// How many calls this thread has begun or refused, in all scopes.
    static BEGUN_HERE: Cell<u64> = const { Cell::new(0) };
}

/// Returns how many calls the calling thread has begun or refused, in all scopes. Other threads of
/// this rank may begin calls of the same scope meanwhile, so the numbers of a scope do not say
/// whether this thread has begun one.
pub(crate) fn begun_by_this_thread() -> u64 {
    BEGUN_HERE.try_with(Cell::get).unwrap_or_default()
}

/// Notes that the calling thread begins a call, or refuses one. A scope calls this for its own
/// calls. dm_shrink and dm_recover call it, too, because they begin before they have a scope, or
/// use none.
pub(crate) fn note_begun_by_this_thread() {
    // A thread whose thread-locals are gone is about to end.
    let _ = BEGUN_HERE.try_with(|begun| begun.set(begun.get() + 1));
}

impl Scope {
    /// Returns a scope whose keys begin with `prefix`, which is equal on all its ranks and is used
    /// once.
    pub(in crate::rendezvous) fn new(membership: Membership, prefix: String) -> Scope {
        Scope {
            membership: Arc::new(membership),
            prefix,
            calls: Arc::default(),
            over: Arc::default(),
            is_behind: Arc::default(),
            refusals: Arc::default(),
            departures: None,
            group: Arc::default(),
            label: None,
        }
    }

    /// Returns this new scope for [`check_order`](super::order::check_order). Its calls are
    /// numbered from 1, as the collectives of a dimension are in the recording.
    #[must_use]
    pub(crate) fn for_order(self) -> Scope {
        self.calls.store(1, Ordering::SeqCst);
        Scope { label: Some("the order check"), ..self }
    }

    /// Returns this scope for calls on one mesh, whose waits end when a rank of the scope has ended
    /// the mesh. The calls of both scopes are numbered together.
    #[must_use]
    pub fn of_mesh(&self, departures: &Arc<Departures>) -> Scope {
        Scope {
            membership: Arc::clone(&self.membership),
            prefix: self.prefix.clone(),
            calls: Arc::clone(&self.calls),
            over: Arc::clone(&self.over),
            is_behind: Arc::clone(&self.is_behind),
            refusals: Arc::clone(&self.refusals),
            departures: Some(Arc::clone(departures)),
            group: Arc::clone(&self.group),
            label: self.label,
        }
    }

    /// Returns when every rank of the scope has made this call as its call of the same number.
    /// Otherwise every rank gets the same error: `DM_STATUS_MISMATCH` with the different calls,
    /// `DM_STATUS_TIMEOUT` with the missing ranks, or `DM_STATUS_PEER_LOST` with a rank that is
    /// lost.
    pub fn agree(&self, call: &str, wait: &Wait) -> Result<Round> {
        self.agree_in_detail(call, "", wait)
    }

    /// Does what [`Scope::agree`] does. The ranks must also agree on `detail`, which the call's
    /// text does not say. A message shows the detail only when the calls are equal and the details
    /// are not.
    pub fn agree_in_detail(&self, call: &str, detail: &str, wait: &Wait) -> Result<Round> {
        self.enter(call, detail, Part::default(), wait)
    }

    /// Does what [`Scope::agree_in_detail`] does, for a call in which each rank may have things
    /// that it could share with the others, such as communicators. `offers` has the same length on
    /// every rank, and names the thing that the rank has at each place. The second result says for
    /// each place whether all ranks have named the same thing there. If so, all ranks share this
    /// thing. Otherwise no rank shares anything at this place.
    pub fn agree_to_share(
        &self,
        call: &str,
        detail: &str,
        offers: &[Option<String>],
        wait: &Wait,
    ) -> Result<(Round, Vec<bool>)> {
        self.share(call, detail, offers, None, wait)
    }

    /// Does what [`Scope::agree_to_share`] does. `failure` says why this rank cannot do its work,
    /// if it cannot. If such a rank stops waiting before all ranks have come, the others are told.
    pub(in crate::rendezvous) fn agree_to_join(
        &self,
        call: &str,
        offers: &[Option<String>],
        failure: Option<&Error>,
        wait: &Wait,
    ) -> Result<(Round, Vec<bool>)> {
        self.share(call, "", offers, failure, wait)
    }

    fn share(
        &self,
        call: &str,
        detail: &str,
        offers: &[Option<String>],
        failure: Option<&Error>,
        wait: &Wait,
    ) -> Result<(Round, Vec<bool>)> {
        let names = offers.iter().map(|offer| offer.as_deref().unwrap_or(NOTHING)).collect();
        let names = names_in_line(names);
        // Only what the first rank offers can be shared, so the other ranks do not publish their
        // offers.
        let offered = if self.membership.me == 0 { names.clone() } else { String::new() };
        let detail = format!("{detail}{DETAIL}{offered}");
        let round = self.enter(call, &detail, Part { offers: Some(names), failure }, wait)?;
        if self.membership.members.len() < 2 {
            let shared = offers.iter().map(Option::is_some).collect();
            return Ok((round, shared));
        }
        let agreed = round.shared.get().map_or("", String::as_str);
        let places: Vec<usize> = agreed.split(' ').filter_map(|place| place.parse().ok()).collect();
        let shared = (0..offers.len()).map(|place| places.contains(&place)).collect();
        Ok((round, shared))
    }

    /// Does what [`Scope::agree`] does, in a scope that is made for one call. Returns `None` when
    /// the call ended in a deadlock of which this rank's caller was told before, or because of a
    /// recovery that this rank has left since. The other ranks are then in another scope.
    pub fn agree_once(&self, call: &str, wait: &Wait) -> Result<Option<Round>> {
        self.enter_next(call, "", &Part::default(), wait)
    }

    /// Refuses a text that the store would not take, before the call gets its number. The caller
    /// then tells the other ranks, as for other refusals.
    fn check_text(&self, text: &str) -> Result<()> {
        match text.len() {
            0..=MOST_TEXT => Ok(()),
            _ if self.membership.members.len() < 2 => Ok(()),
            len => Err(Error::invalid(format!(
                "the ranks compare their calls by texts of at most {MOST_TEXT} bytes, but the dimensions of this one give a text of {len} bytes: take shorter names, or fewer dimensions"
            ))),
        }
    }

    /// Takes part in the next call that concerns this rank.
    fn enter(&self, call: &str, detail: &str, part: Part<'_>, wait: &Wait) -> Result<Round> {
        loop {
            if let Some(round) = self.enter_next(call, detail, &part, wait)? {
                return Ok(round);
            }
        }
    }

    /// Takes part in the next call. When the call is agreed, all ranks have left the earlier calls,
    /// so the keys that this rank left for the earlier calls are removed. Returns `None` when the
    /// call is of no concern to this rank.
    fn enter_next(&self, call: &str, detail: &str, part: &Part<'_>, wait: &Wait) -> Result<Option<Round>> {
        let text = format!("{call}{DETAIL}{detail}");
        self.check_turn(call)?;
        self.check_text(&text)?;
        let round = Round { failure: part.failure.cloned(), offers: part.offers.clone(), ..self.join_next(call) };
        if self.membership.members.len() < 2 {
            round.recorded.set_ends_well(true);
            return Ok(Some(round));
        }
        if self.over.load(Ordering::SeqCst) && round.has_lost() {
            let _ = self.membership.losses.refresh(wait);
            return Err(round.lost_before(&round.lost()).in_call(round.number));
        }
        if self.is_behind.load(Ordering::SeqCst) && round.was_given_up(wait) {
            return Ok(None);
        }
        let removable = self.membership.left.take();
        let settled = round.reach_verdict("", deciding::Part::Equal(Some(&text)), wait);
        // The note is taken back before the rank begins another call, because other ranks rely on
        // the note while it is in the store.
        take_back_note(&round, wait);
        match settled {
            Ok(Settled::Agreed) => {
                self.membership.store.forget(removable, wait);
                round.recorded.set_ends_well(true);
                Ok(Some(round))
            }
            Ok(Settled::PassedOver) => {
                self.membership.left.note(removable);
                Ok(None)
            }
            Err(error) => {
                self.membership.left.note(removable);
                // The store keeps the loss, so every rank finds it by itself, and no later call
                // needs keys for it.
                if error.status() == Status::PeerLost && round.has_lost() {
                    self.over.store(true, Ordering::SeqCst);
                }
                Err(self.explained(error))
            }
        }
    }

    /// Fails when the epoch of the scope is over, or when a rank has come to a turn whose decision
    /// this rank has not read. The call that this rank would make gets no number then: ranks that
    /// leave the turn without a new epoch have the same number.
    pub(super) fn check_turn(&self, call: &str) -> Result<()> {
        if self.membership.members.len() < 2 {
            return Ok(());
        }
        self.membership.check_epoch()?;
        match self.membership.losses.turns().next() {
            Some(_) => {
                let round = self.round_of(call, self.calls_begun());
                round.turn().map_or(Ok(()), Verdict::into_result).map_err(|error| error.in_call(round.number))
            }
            None => Ok(()),
        }
    }

    /// Returns how many calls of the scope this rank has begun.
    pub(in crate::rendezvous) fn calls_begun(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Returns the number of ranks of the scope.
    pub(crate) fn num_ranks(&self) -> usize {
        self.membership.members.len()
    }

    /// Returns the world rank at a position of the scope.
    pub(crate) fn rank_at(&self, position: usize) -> i32 {
        self.membership.members.rank(position)
    }

    /// Returns the position of a world rank in the scope.
    pub(crate) fn position_of(&self, rank: i32) -> Option<usize> {
        self.membership.members.position(rank)
    }

    /// Takes the values that the ranks of the scope gave, in the order of their positions, and
    /// returns these values in the order of the ranks of a world of `size` ranks. The ranks of the
    /// world that are not in the scope get the default.
    pub(crate) fn by_rank<T: Default>(&self, values: Vec<T>, size: usize) -> Vec<T> {
        if let Members::All(_) = &self.membership.members {
            return values.into_iter().chain(std::iter::repeat_with(T::default)).take(size).collect();
        }
        let mut all: Vec<T> = std::iter::repeat_with(T::default).take(size).collect();
        for (position, value) in values.into_iter().enumerate() {
            if let Some(place) = all.get_mut(self.membership.members.rank(position) as usize) {
                *place = value;
            }
        }
        all
    }

    /// Returns two keys. One of them exists once `rank` has begun the next call, or once that call
    /// has ended. The calling rank is in no call of the scope.
    pub(crate) fn keys_of_next_call(&self, rank: i32) -> [String; 2] {
        let round = self.round_of("", self.calls_begun());
        [self.here_in(&round, rank), round.key("", "verdict")]
    }

    /// Returns the text of the next call of the scope, where that rank has begun the call; `None`
    /// where it has not. This rank, which is in no call of the scope, first passes over the calls
    /// that have ended without it.
    pub(crate) fn next_call(&self, rank: i32, wait: &Wait) -> Result<Option<String>> {
        let store = &self.membership.store;
        loop {
            let round = self.round_of("", self.calls_begun());
            if store.try_get(&round.key("", "verdict"), wait)?.is_none() {
                let note = store.try_get(&self.here_in(&round, rank), wait)?;
                let text = |note: Vec<u8>| String::from_utf8_lossy(&note).split(DETAIL).next().map(str::to_owned);
                return Ok(note.and_then(text));
            }
            // Another thread of this rank may have begun this call.
            let _ = self.calls.compare_exchange(round.number, round.number + 1, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Returns the key of the note that this rank of the scope has begun that call.
    fn here_in(&self, round: &Round, rank: i32) -> String {
        round.here("", self.position_of(rank).unwrap_or(0))
    }

    /// Notes that the caller of this rank was told of a failed call of which the other ranks have
    /// not heard. If the others give up a call because of that, the next call of this rank goes on
    /// where they are.
    pub(crate) fn may_be_behind(&self) {
        self.is_behind.store(true, Ordering::SeqCst);
    }

    /// Tells the other ranks that this rank has refused its own call of `function`, for example
    /// because of a wrong argument, and takes no part in it. The refusal counts as a call of this
    /// rank. The ranks that make a call of this function under that number fail at once. The other
    /// ranks pass over the number. Does nothing when the store does not answer, and after 1,000
    /// refusals in a row.
    pub(crate) fn tell_refusal(&self, function: &str, error: &Error, wait: &Wait) {
        if self.membership.members.len() < 2 || self.over.load(Ordering::SeqCst) || self.check_turn(function).is_err() {
            return;
        }
        if self.refusals.fetch_add(1, Ordering::SeqCst) >= MOST_REFUSALS {
            return;
        }
        loop {
            let round = self.next_round(function);
            let refusal = Verdict::of_refusal(round.my_rank(), function, round.number, error);
            let Ok(stands) = round.decide("", &refusal, wait) else {
                let next = round.number + 1;
                let _ = self.calls.compare_exchange(next, round.number, Ordering::SeqCst, Ordering::SeqCst);
                return;
            };
            // The others gave this call up, or it concerns another function. So the ranks that wait
            // for this rank are in a later call.
            if !(round.is_late_for(&stands, wait) || stands.is_of_another(function)) {
                self.is_behind.store(false, Ordering::SeqCst);
                return;
            }
        }
    }

    /// Makes `error` the verdict of the next call, in which this rank takes no part.
    pub(in crate::rendezvous) fn refuse(&self, error: &Error, wait: &Wait) {
        let _ = self.next_round("").decide("", &Verdict::of(error), wait);
    }

    /// Returns the error of a call of the scope, with what the recordings say about the call.
    pub(super) fn explained(&self, error: Error) -> Error {
        recorder::explained(error, self.group())
    }

    /// Whether the other ranks may have given up calls for which this rank did not come.
    pub(super) fn may_have_been_given_up(&self) -> bool {
        self.is_behind.load(Ordering::SeqCst)
    }

    /// Begins the next call, in which this rank takes part. The rank's row of refusals ends with
    /// this call.
    pub(super) fn join_next(&self, call: &str) -> Round {
        self.refusals.store(0, Ordering::SeqCst);
        let recorded = self.group().begin_agreement(operation_of(call), call);
        Round { recorded, ..self.next_round(call) }
    }

    /// Returns the scope in the recording.
    fn group(&self) -> &Group {
        self.group.get_or_init(|| {
            let Membership { members, me, record, .. } = &*self.membership;
            let ranks = recorder::members(members.len(), |position| members.rank(position));
            let key = record.digest().text(&self.prefix);
            let name = self.prefix.strip_prefix(self.membership.losses.prefix()).unwrap_or(&self.prefix);
            let of_keys = if matches!(members, Members::All(_)) { "the world" } else { name.trim_start_matches('/') };
            let name = self.label.unwrap_or(of_keys);
            Group::open(Kind::Scope, record, key, (*me, members.len()), &ranks, name)
        })
    }

    /// Begins the next call. A rank that refuses the call takes no part in it.
    fn next_round(&self, call: &str) -> Round {
        note_begun_by_this_thread();
        self.round_of(call, self.calls.fetch_add(1, Ordering::SeqCst))
    }

    fn round_of(&self, call: &str, number: u64) -> Round {
        let prefix = format!("{}/{number}", self.prefix);
        let (membership, call) = (Arc::clone(&self.membership), call.to_owned());
        Round {
            membership,
            prefix,
            call,
            number,
            search: Arc::default(),
            failure: None,
            offers: None,
            shared: OnceLock::new(),
            is_behind: Arc::clone(&self.is_behind),
            departures: self.departures.clone(),
            recorded: RecordedAgreement::none(),
        }
    }
}

/// The things beside its text with which a rank takes part in a call.
#[derive(Default)]
struct Part<'a> {
    /// The things that this rank could share, in one line; `None` when the call shares nothing.
    offers: Option<String>,
    /// Why this rank cannot do its work, if it cannot.
    failure: Option<&'a Error>,
}

/// Returns the operation as which the recording lists a call of this text.
fn operation_of(call: &str) -> Operation {
    let function = call.split('(').next().unwrap_or_default();
    match function {
        _ if function.ends_with("barrier") => Operation::Barrier,
        _ if function.ends_with("_bytes") => Operation::StoreBytes,
        _ => Operation::Agreement,
    }
}

fn names_in_line(names: Vec<&str>) -> String {
    names.join(" ")
}
