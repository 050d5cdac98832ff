//! Threads that sleep on words and on doorbells.

use std::time::Instant;

use super::*;
use crate::labels::Labels;
use crate::segment::{self, Segment};

const LONG: Duration = Duration::from_secs(20);
/// A sleep of [`LONG`] that lasts for this time has lost its wake-up.
const LOST: Duration = Duration::from_secs(15);

#[test]
fn a_change_wakes_the_sleeper_long_before_its_time() {
    let (event, other) = (Event::default(), Event::default());
    for watched in 1..=2 {
        let before = event.value();
        let all = [Watch { event: &event, seen: before }, Watch { event: &other, seen: 0 }];
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| event.set(before + 1));
            while event.value() == before {
                sleep(&all[..watched], None, Duration::from_secs(20));
            }
        });
        assert!(started.elapsed() < Duration::from_secs(10), "the wake-up was lost with {watched} words");
    }
    assert_eq!(event.sleepers.load(Ordering::SeqCst), 0);
}

/// Sleeps, and notes in `longest` how long the sleep was, where no sleep before it was longer.
fn timed(longest: &mut Duration, sleep: impl FnOnce()) {
    let began = Instant::now();
    sleep();
    *longest = began.elapsed().max(*longest);
}

#[test]
fn no_wake_up_is_lost_in_many_handovers() {
    let (there, back) = (Event::default(), Event::default());
    let mut longest = [Duration::ZERO; 2];
    let [here, elsewhere] = &mut longest;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0..20_000 {
                while there.value() == turn {
                    timed(elsewhere, || sleep(&[Watch { event: &there, seen: turn }], None, LONG));
                }
                back.set(turn + 1);
            }
        });
        for turn in 0..20_000 {
            there.set(turn + 1);
            while back.value() == turn {
                timed(here, || sleep(&[Watch { event: &back, seen: turn }], None, LONG));
            }
        }
    });
    // The sum of all sleeps is long on a busy machine.
    assert!(longest.iter().all(|longest| *longest < LOST), "a sleeper waited out its slice: {longest:?}");
}

#[test]
fn more_words_than_the_kernel_watches_are_looked_at_in_turn() {
    let events: Vec<Event> = (0..futex::WAITV_MAX + 2).map(|_| Event::default()).collect();
    let watches: Vec<_> = events.iter().map(|event| Watch { event, seen: 0 }).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| events[futex::WAITV_MAX + 1].set(1));
        while events[futex::WAITV_MAX + 1].value() == 0 {
            sleep(&watches, None, Duration::from_secs(20));
        }
    });
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn time_runs_out() {
    let event = Event::default();
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(30) {
        sleep(&[Watch { event: &event, seen: 0 }], None, Duration::from_millis(10));
    }
    let watches = [Watch { event: &event, seen: 0 }, Watch { event: &event, seen: 0 }];
    sleep(&watches, None, Duration::from_millis(10));
}

/// Returns two mappings of one segment.
fn two_mappings() -> (Segment, Segment) {
    let fd = segment::create([8; 16]).unwrap();
    let map = |rank| Segment::map(&fd, 2, rank, &Labels::default()).unwrap();
    (map(0), map(1))
}

#[test]
fn a_change_in_another_mapping_rings_the_bell_of_the_sleeper() {
    let (mine, theirs) = two_mappings();
    let mut longest = [Duration::ZERO; 2];
    let [here, elsewhere] = &mut longest;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0..5_000 {
                while theirs.channel(0, 1).head.value() == turn {
                    let head = Watch { event: &theirs.channel(0, 1).head, seen: turn };
                    let alarm = Watch { event: &theirs.header().alarm, seen: 0 };
                    timed(elsewhere, || theirs.bell(1).sleep(&[head, alarm], LONG));
                }
                theirs.channel(0, 1).tail.set(turn + 1);
            }
        });
        for turn in 0..5_000 {
            mine.channel(0, 1).head.set(turn + 1);
            while mine.channel(0, 1).tail.value() == turn {
                let tail = Watch { event: &mine.channel(0, 1).tail, seen: turn };
                let alarm = Watch { event: &mine.header().alarm, seen: 0 };
                timed(here, || mine.bell(0).sleep(&[alarm, tail], LONG));
            }
        }
    });
    assert!(longest.iter().all(|longest| *longest < LOST), "a ring was lost: {longest:?}");
    assert_eq!(mine.bell(0).all.iter().map(|bell| bell.sleepers.load(Ordering::SeqCst)).sum::<u32>(), 0);
}

#[test]
fn one_change_wakes_all_sleepers_of_all_ranks() {
    let (mine, theirs) = two_mappings();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (segment, rank) in [(&mine, 0), (&theirs, 1), (&mine, 0), (&theirs, 17)] {
            scope.spawn(move || {
                while segment.header().alarm.value() == 0 {
                    let alarm = Watch { event: &segment.header().alarm, seen: 0 };
                    let head = Watch { event: &segment.channel(1, 0).head, seen: 0 };
                    segment.bell(rank).sleep(&[head, alarm], LONG);
                }
            });
        }
        while mine.bell(0).all.iter().map(|bell| bell.sleepers.load(Ordering::SeqCst)).sum::<u32>() < 4 {
            assert!(started.elapsed() < LONG);
            std::thread::yield_now();
        }
        theirs.header().alarm.set(1);
    });
    assert!(started.elapsed() < LONG / 2, "a sleeper waited out its time");
}

#[test]
fn more_words_than_the_kernel_watches_are_watched_by_the_bell() {
    const WORDS: usize = futex::WAITV_MAX + 2;
    let fd = segment::create([9; 16]).unwrap();
    let segment = Segment::map(&fd, WORDS as u32, 0, &Labels::default()).unwrap();
    let watches: Vec<_> = (0..WORDS).map(|from| Watch { event: &segment.channel(from, 0).head, seen: 0 }).collect();
    let (started, last) = (Instant::now(), &segment.channel(WORDS - 1, 0).head);
    let mut sleeps = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            last.set(1);
        });
        while last.value() == 0 {
            sleep(&watches, Some(segment.bell(0)), LONG);
            sleeps += 1;
        }
    });
    assert!(started.elapsed() < LONG / 2, "the change did not ring");
    assert!(sleeps < 10, "the thread woke {sleeps} times for one change");
}

#[test]
fn time_runs_out_and_a_changed_word_needs_no_sleep() {
    let (mine, _theirs) = two_mappings();
    let head = Watch { event: &mine.channel(1, 0).head, seen: 0 };
    let started = Instant::now();
    mine.bell(0).sleep(&[head, head], Duration::from_millis(10));
    assert!(started.elapsed() >= Duration::from_millis(9));
    mine.channel(1, 0).head.store(3);
    mine.bell(0).sleep(&[head, head], LONG);
    assert!(started.elapsed() < LONG / 2);
}
