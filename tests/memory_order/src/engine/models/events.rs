//! Events: no wake-up is lost, and whoever sees a value sees what was written before it.

use std::sync::Arc;
use std::time::Duration;

use memory_order::check::Model;
use memory_order::futex;
use memory_order::sync::{AtomicU32, Ordering};

use super::{Plain, spawn};
use crate::event::{Asleep, BELLS, Bell, Event, Watch, sleep};

pub(super) const MODELS: &[Model] = &[
    Model { name: "event: one sleeper", preemptions: Some(3), waitv: true, run: one_sleeper },
    Model { name: "event: a counter", preemptions: Some(2), waitv: true, run: counter },
    Model { name: "event: two words", preemptions: Some(2), waitv: true, run: two_words },
    Model { name: "event: doorbell", preemptions: Some(2), waitv: false, run: doorbell },
    Model { name: "event: shared doorbell", preemptions: Some(1), waitv: false, run: shared_doorbell },
    Model { name: "event: asleep elsewhere", preemptions: None, waitv: true, run: asleep_elsewhere },
];

struct State {
    /// The doorbells come after the words, so a wrong distance leads to another event.
    words: [Event; 2],
    bells: [Event; BELLS],
    plain: [Plain<u32>; 2],
}

impl State {
    fn new() -> Arc<State> {
        Arc::new(State { words: Default::default(), bells: Default::default(), plain: [Plain::new(0), Plain::new(0)] })
    }

    fn set(&self, number: usize) {
        self.plain[number].set(7);
        self.words[number].set(1);
    }

    /// Sleeps until both words are set.
    fn wait_for_both(&self, bell: Option<usize>) {
        let bell = bell.map(|rank| Bell { all: &self.bells, rank });
        loop {
            let seen = self.words.each_ref().map(Event::value);
            if seen == [1, 1] {
                break;
            }
            let [first, second] = [0, 1].map(|number| Watch { event: &self.words[number], seen: seen[number] });
            sleep(&[first, second], bell, Duration::MAX);
        }
        assert_eq!(self.plain.each_ref().map(Plain::get), [7, 7]);
    }
}

/// A thread sets a word, and another one sleeps until the word is set.
fn one_sleeper() {
    let state = State::new();
    let setter = spawn(&state, |state| state.set(0));
    while state.words[0].value() == 0 {
        sleep(&[Watch { event: &state.words[0], seen: 0 }], None, Duration::MAX);
    }
    assert_eq!(state.plain[0].get(), 7);
    setter.join().unwrap();
}

/// Two threads write, and count one up each. The third sleeps until both have counted.
fn counter() {
    let state = State::new();
    let counters = [0, 1].map(|number| {
        spawn(&state, move |state| {
            state.plain[number].set(7);
            if state.words[0].change() == 2 {
                // Whoever counts last sees what the other one has written.
                assert_eq!(state.plain[1 - number].get(), 7);
            }
        })
    });
    loop {
        let seen = state.words[0].value();
        if seen == 2 {
            break;
        }
        sleep(&[Watch { event: &state.words[0], seen }], None, Duration::MAX);
    }
    assert_eq!(state.plain.each_ref().map(Plain::get), [7, 7]);
    counters.into_iter().for_each(|counter| counter.join().unwrap());
}

/// A thread sleeps on two words by `futex_waitv`, which two threads set.
fn two_words() {
    let state = State::new();
    let setters = [0, 1].map(|number| spawn(&state, move |state| state.set(number)));
    state.wait_for_both(None);
    setters.into_iter().for_each(|setter| setter.join().unwrap());
}

/// A thread sleeps on two words by its doorbell. Two threads set the words.
fn doorbell() {
    let state = State::new();
    let setters = [0, 1].map(|number| spawn(&state, move |state| state.set(number)));
    state.wait_for_both(Some(0));
    setters.into_iter().for_each(|setter| setter.join().unwrap());
}

/// Two threads of one rank sleep on two words by one doorbell. One thread sets the words.
fn shared_doorbell() {
    let state = State::new();
    let sleeper = spawn(&state, |state| state.wait_for_both(Some(1)));
    let setter = spawn(&state, |state| (0..2).for_each(|number| state.set(number)));
    state.wait_for_both(Some(1));
    sleeper.join().unwrap();
    setter.join().unwrap();
}

/// A thread waits for a word, and sleeps in another way than on words, as the threads of a wire do
/// in epoll. The thread that changes the word rings a bell, which is another word here and a
/// descriptor there.
fn asleep_elsewhere() {
    let state = Arc::new((Event::default(), Asleep::default(), AtomicU32::new(0)));
    let setter = spawn(&state, |(word, asleep, bell)| {
        word.change();
        if asleep.is() {
            bell.store(1, Ordering::Relaxed);
            futex::wake(bell);
        }
    });
    let (word, asleep, bell) = &*state;
    asleep.begin();
    if word.value() == 0 {
        futex::wait(bell, 0, Duration::MAX);
    }
    asleep.end();
    setter.join().unwrap();
}
