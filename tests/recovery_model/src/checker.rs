//! Visits all states of a model, breadth first, so the way to the first violation is a shortest
//! one.
//!
//! For a visited state the checker keeps a fingerprint of 64 bits, and the transition that led to
//! the state. Two states with one fingerprint would hide the second one. A job has at most 1.5
//! million states, so the chance of one such pair is about 1 in 16 million.

use std::collections::HashMap;
use std::fmt::{self, Debug, Display};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A model that the checker can check.
pub(crate) trait Model {
    /// Everything that decides what can happen next.
    type State: Clone + Hash + Debug;
    /// A transition.
    type Action: Copy + Display;

    /// Returns the state in which everything begins.
    fn initial(&self) -> Self::State;

    /// Returns every transition from that state, with the state to which it leads.
    fn transitions(&self, state: &Self::State) -> Vec<(Self::Action, Self::State)>;

    /// Returns a number that every transition increases. So no run is endless, and every run ends
    /// in a state without transitions.
    fn age(&self, state: &Self::State) -> u32;

    /// Returns what is wrong with this state, if something is.
    fn wrong(&self, state: &Self::State) -> Option<String>;
}

/// A model whose reachable states are all right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// The number of states that were visited.
    pub states: usize,
    /// The number of transitions between them.
    pub transitions: usize,
}

/// A state that breaks a property, and a shortest way to it.
#[derive(Debug)]
pub struct Violation {
    /// The property, and how the state breaks it.
    pub what: String,
    /// The transitions from the initial state, one line for each.
    pub way: Vec<String>,
    /// The state.
    pub state: String,
}

impl Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}", self.what)?;
        for (number, line) in self.way.iter().enumerate() {
            writeln!(out, "{:3}. {line}", number + 1)?;
        }
        write!(out, "{}", self.state)
    }
}

/// For each visited state, by its fingerprint, the fingerprint of the state before it, and the
/// number of the transition there.
type Visited = HashMap<u64, (u64, u16), BuildHasherDefault<Itself>>;

pub(crate) fn check<M: Model>(model: &M) -> Result<Checked, Violation> {
    let first = model.initial();
    let start = fingerprint(&first);
    let mut visited = Visited::from_iter([(start, (start, 0))]);
    let (mut layer, mut transitions) = (vec![(start, first)], 0);
    while !layer.is_empty() {
        let mut next_layer = Vec::new();
        for (here, state) in layer {
            if let Some(what) = model.wrong(&state) {
                return Err(violation(model, &visited, here, what));
            }
            let age = model.age(&state);
            for (number, (action, next)) in model.transitions(&state).into_iter().enumerate() {
                transitions += 1;
                assert!(model.age(&next) > age, "{action} does not increase the age of {state:?}: {next:?}");
                let there = fingerprint(&next);
                visited.entry(there).or_insert_with(|| {
                    next_layer.push((there, next));
                    (here, number as u16)
                });
            }
        }
        layer = next_layer;
    }
    Ok(Checked { states: visited.len(), transitions })
}

fn fingerprint(state: &impl Hash) -> u64 {
    let mut hasher = Folded { state: 0x9e37_79b9_7f4a_7c15, pending: 0, bits: 0 };
    state.hash(&mut hasher);
    hasher.finish()
}

/// A hash by folded multiplication, as in wyhash. States are hashed field by field, and nearly
/// every field is one byte. So bytes are gathered, and eight of them are multiplied at once.
/// SipHash takes most of the checker's time.
struct Folded {
    state: u64,
    /// The bytes that wait for the next multiplication.
    pending: u64,
    /// The number of their bits, below 64.
    bits: u32,
}

/// Returns the state of [`Folded`] after eight more bytes.
fn folded(state: u64, bytes: u64) -> u64 {
    let product = u128::from(state ^ bytes.wrapping_add(1)) * 0xa076_1d64_78bd_642f;
    (product as u64) ^ ((product >> 64) as u64)
}

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    #[inline]
    fn write_u8(&mut self, number: u8) {
        self.pending |= u64::from(number) << self.bits;
        self.bits += 8;
        if self.bits == 64 {
            self.state = folded(self.state, self.pending);
            (self.pending, self.bits) = (0, 0);
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.state = folded(self.state, number);
    }

    /// The length of an array, which is the same in every state.
    fn write_usize(&mut self, _number: usize) {}

    /// The number of an enum's variant. No enum of a state has more than 256.
    #[inline]
    fn write_isize(&mut self, number: isize) {
        debug_assert!((0..=0xff).contains(&number), "{number} is more than a byte");
        self.write_u8(number as u8);
    }

    fn finish(&self) -> u64 {
        folded(self.state, self.pending)
    }
}

/// The hash of a fingerprint, which is a hash already.
#[derive(Default)]
struct Itself(u64);

impl Hasher for Itself {
    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("a fingerprint is a number of 64 bits");
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Goes back from the state to the initial one, and makes the same transitions again.
fn violation<M: Model>(model: &M, visited: &Visited, wrong: u64, what: String) -> Violation {
    let (mut numbers, mut at) = (Vec::new(), wrong);
    let start = fingerprint(&model.initial());
    while at != start {
        let (before, number) = visited[&at];
        numbers.push(number);
        at = before;
    }
    let (mut state, mut way) = (model.initial(), Vec::new());
    for number in numbers.into_iter().rev() {
        let (action, next) = model.transitions(&state).swap_remove(usize::from(number));
        way.push(action.to_string());
        state = next;
    }
    Violation { what, way, state: format!("{state:#?}") }
}
