use super::*;
use proptest::prelude::*;

const SECRET: &[u8] = b"a secret that nobody can guess";

/// Returns both sides after the handshake.
fn pair() -> (Session, Session) {
    let (mut a, mut b) = (Session::initiator(SECRET, b"it").unwrap(), Session::responder(SECRET, b"it").unwrap());
    shake(&mut a, &mut b).unwrap();
    assert!(a.is_ready() && b.is_ready());
    (a, b)
}

fn shake(a: &mut Session, b: &mut Session) -> Result<(), Broken> {
    let (mut first, mut second, mut nothing) = (Vec::new(), Vec::new(), Vec::new());
    a.write_message(b"", &mut first)?;
    b.read_message(&first, &mut nothing)?;
    b.write_message(b"", &mut second)?;
    a.read_message(&second, &mut nothing)?;
    assert_eq!((first.len(), second.len(), nothing.len()), (HANDSHAKE_BYTES, HANDSHAKE_BYTES, 0));
    Ok(())
}

fn sealed(session: &mut Session, plain: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    session.seal(plain, &mut out).unwrap();
    assert_eq!(out.len(), plain.len() + TAG_BYTES);
    out
}

fn opened(session: &mut Session, record: &[u8]) -> Result<Vec<u8>, Broken> {
    let mut out = vec![7; 3];
    let done = session.open(record, &mut out);
    assert_eq!(out[..3], [7; 3], "what stood in the buffer is still there");
    done.map(|()| out.split_off(3))
}

#[test]
fn records_go_both_ways() {
    let (mut a, mut b) = pair();
    for plain in [&b""[..], b"x", &[3; RECORD_BYTES]] {
        let record = sealed(&mut a, plain);
        assert!(plain.len() < 8 || !record.windows(8).any(|window| window == &plain[..8]));
        assert_eq!(opened(&mut b, &record).unwrap(), plain);
        let back = sealed(&mut b, plain);
        assert_eq!(opened(&mut a, &back).unwrap(), plain);
    }
    assert_eq!((a.opened(), b.opened()), (3, 3));
    assert_eq!(a.seal(&[0; RECORD_BYTES + 1], &mut Vec::new()), Err(Broken::TooLong(RECORD_BYTES + 1)));
    assert!(a.is_ready(), "a text that is too long is refused, and no more");
}

#[test]
fn messages_of_the_handshake_carry_payloads() {
    let (mut a, mut b) = (Session::initiator(SECRET, b"it").unwrap(), Session::responder(SECRET, b"it").unwrap());
    let (mut first, mut second, mut got) = (vec![1], Vec::new(), Vec::new());
    a.write_message(b"who I am", &mut first).unwrap();
    assert!(!first.windows(3).any(|window| window == b"who"));
    b.read_message(&first[1..], &mut got).unwrap();
    b.write_message(b"and I", &mut second).unwrap();
    a.read_message(&second, &mut got).unwrap();
    assert_eq!(got, b"who I amand I");
    let long = [0; RECORD_BYTES];
    let mut c = Session::initiator(SECRET, b"it").unwrap();
    assert_eq!(c.write_message(&long, &mut Vec::new()), Err(Broken::TooLong(long.len())));
}

#[test]
fn another_secret_or_prologue_is_refused() {
    let sides: [(&[u8], &[u8]); 3] = [(b"another secret", b"it"), (b"", b"it"), (SECRET, b"something else")];
    for (secret, prologue) in sides {
        let mut a = Session::initiator(secret, prologue).unwrap();
        let mut b = Session::responder(SECRET, b"it").unwrap();
        assert_eq!(shake(&mut a, &mut b), Err(Broken::Handshake));
        assert_eq!(b.write_message(b"", &mut Vec::new()), Err(Broken::OutOfTurn), "the session has ended");
    }
    assert!(Broken::Handshake.to_string().contains("does not have the same secret"));
}

#[test]
fn calls_out_of_turn_are_refused_and_change_nothing() {
    let (mut a, mut b) = (Session::initiator(SECRET, b"it").unwrap(), Session::responder(SECRET, b"it").unwrap());
    let mut out = Vec::new();
    assert_eq!(a.seal(b"x", &mut out), Err(Broken::OutOfTurn));
    assert_eq!(a.open(&[0; 20], &mut out), Err(Broken::OutOfTurn));
    assert_eq!(a.read_message(&[0; HANDSHAKE_BYTES], &mut out), Err(Broken::OutOfTurn));
    assert_eq!(b.write_message(b"", &mut out), Err(Broken::OutOfTurn));
    assert_eq!(out, []);
    shake(&mut a, &mut b).unwrap();
    assert_eq!(a.write_message(b"", &mut out), Err(Broken::OutOfTurn));
    assert_eq!(b.read_message(&[0; HANDSHAKE_BYTES], &mut out), Err(Broken::OutOfTurn));
    let record = sealed(&mut a, b"still fine");
    assert_eq!(opened(&mut b, &record).unwrap(), b"still fine");
}

#[test]
fn a_repeated_record_ends_the_session() {
    let (mut a, mut b) = pair();
    let (first, second) = (sealed(&mut a, b"one"), sealed(&mut a, b"two"));
    assert_eq!(opened(&mut b, &first).unwrap(), b"one");
    assert_eq!(opened(&mut b, &first), Err(Broken::Record));
    assert_eq!(opened(&mut b, &second), Err(Broken::OutOfTurn), "nothing opens after that");
}

#[test]
fn records_in_another_order_do_not_open() {
    let (mut a, mut b) = pair();
    let (_first, second) = (sealed(&mut a, b"one"), sealed(&mut a, b"two"));
    assert_eq!(opened(&mut b, &second), Err(Broken::Record));
}

#[test]
fn a_record_does_not_come_back_to_its_sender_or_go_to_another_session() {
    let (mut a, mut b) = pair();
    let (_, mut other) = pair();
    let record = sealed(&mut a, b"mine");
    assert_eq!(opened(&mut a, &record), Err(Broken::Record));
    assert_eq!(opened(&mut other, &record), Err(Broken::Record));
    assert_eq!(opened(&mut b, &record).unwrap(), b"mine");
}

#[test]
fn a_repeated_first_message_opens_no_session() {
    let (mut a, mut b, mut late) = (
        Session::initiator(SECRET, b"it").unwrap(),
        Session::responder(SECRET, b"it").unwrap(),
        Session::responder(SECRET, b"it").unwrap(),
    );
    let (mut first, mut second, mut nothing) = (Vec::new(), Vec::new(), Vec::new());
    a.write_message(b"", &mut first).unwrap();
    b.read_message(&first, &mut nothing).unwrap();
    b.write_message(b"", &mut second).unwrap();
    a.read_message(&second, &mut nothing).unwrap();
    let record = sealed(&mut a, b"pay 5");
    assert_eq!(opened(&mut b, &record).unwrap(), b"pay 5");
    // Somebody who saw all this sends the same bytes to a later responder.
    late.read_message(&first, &mut nothing).unwrap();
    late.write_message(b"", &mut Vec::new()).unwrap();
    assert_eq!((opened(&mut late, &record), late.opened()), (Err(Broken::Record), 0));
}

#[test]
fn keys_change_and_records_still_open() {
    let (mut a, mut b) = pair();
    (a.records_a_key, b.records_a_key) = (3, 3);
    for round in 0..20_u8 {
        let record = sealed(&mut a, &[round]);
        assert_eq!(opened(&mut b, &record).unwrap(), [round]);
        if round % 2 == 0 {
            let back = sealed(&mut b, &[round, round]);
            assert_eq!(opened(&mut a, &back).unwrap(), [round, round]);
        }
    }
    // Without its new key the other side opens nothing more.
    b.records_a_key = 1 << 20;
    for round in 0..4 {
        let record = sealed(&mut a, b"x");
        if opened(&mut b, &record).is_err() {
            assert!(round > 0);
            return;
        }
    }
    panic!("the keys did not change");
}

#[test]
fn nothing_secret_is_printed() {
    let (a, _) = pair();
    assert_eq!(format!("{a:?}"), "Session { state: \"ready\", sealed: 0, .. }");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn garbage_is_no_first_message(message in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut b = Session::responder(SECRET, b"it").unwrap();
        let mut out = Vec::new();
        prop_assert_eq!(b.read_message(&message, &mut out), Err(Broken::Handshake));
        prop_assert!(out.is_empty() && !b.is_ready());
    }

    #[test]
    fn garbage_is_no_second_message(message in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut a = Session::initiator(SECRET, b"it").unwrap();
        a.write_message(b"", &mut Vec::new()).unwrap();
        prop_assert_eq!(a.read_message(&message, &mut Vec::new()), Err(Broken::Handshake));
    }

    #[test]
    fn a_changed_or_cut_message_is_refused(at in any::<proptest::sample::Index>(), bit in 0..8, cut in any::<bool>()) {
        let (mut a, mut b) = (Session::initiator(SECRET, b"it").unwrap(), Session::responder(SECRET, b"it").unwrap());
        let mut first = Vec::new();
        a.write_message(b"", &mut first).unwrap();
        let at = at.index(first.len());
        if cut { first.truncate(at) } else { first[at] ^= 1_u8 << bit }
        prop_assert_eq!(b.read_message(&first, &mut Vec::new()), Err(Broken::Handshake));
    }

    #[test]
    fn a_changed_or_cut_record_does_not_open(
        plain in proptest::collection::vec(any::<u8>(), 0..300),
        at in any::<proptest::sample::Index>(),
        bit in 0..8,
        cut in any::<bool>(),
    ) {
        let (mut a, mut b) = pair();
        let mut record = sealed(&mut a, &plain);
        let at = at.index(record.len());
        if cut { record.truncate(at) } else { record[at] ^= 1_u8 << bit }
        prop_assert_eq!(opened(&mut b, &record), Err(Broken::Record));
    }

    #[test]
    fn texts_of_any_length_come_through(lengths in proptest::collection::vec(0..RECORD_BYTES, 1..6)) {
        let (mut a, mut b) = pair();
        for length in lengths {
            let plain: Vec<u8> = (0..length).map(|i| (i * 31) as u8).collect();
            let record = sealed(&mut a, &plain);
            prop_assert_eq!(opened(&mut b, &record).unwrap(), plain);
        }
    }
}

/// Prints processor time, which other programs on the machine disturb less than they disturb the
/// clock: `cargo test --release -p hostccl --lib -- --ignored --nocapture noise::tests::speed`
#[test]
#[ignore = "a measurement, for docs/protocol.md"]
fn speed() {
    let now = || {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes the time into `time`.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    for bytes in [64, 1 << 10, 16 << 10, RECORD_BYTES] {
        let (mut a, mut b) = pair();
        let (plain, mut text) = (vec![5; bytes], Vec::new());
        let (mut records, mut took) = (vec![Vec::new(); 64], [0.0; 2]);
        let rounds = (4 << 20) / (bytes + 1000);
        for _ in 0..rounds {
            let begin = now();
            for record in &mut records {
                record.clear();
                a.seal(&plain, record).unwrap();
            }
            took[0] += now() - begin;
            let begin = now();
            for record in &records {
                text.clear();
                b.open(record, &mut text).unwrap();
            }
            took[1] += now() - begin;
        }
        let [seal, open] = took.map(|took| took / (64 * rounds) as f64);
        let rate = |time: f64| bytes as f64 / time / 1e9;
        let (micros, rates) = ([seal, open].map(|time| time * 1e6), [seal, open].map(rate));
        println!("{bytes} B: us to seal and to open {micros:.2?}, GB/s {rates:.2?}");
    }
    let begin = now();
    (0..200).for_each(|_| drop(pair()));
    println!("a handshake, both sides: {:.0} us", (now() - begin) / 200.0 * 1e6);
    let (begin, mut nothing) = (now(), Vec::new());
    for _ in 0..200 {
        Session::responder(SECRET, b"it").unwrap().read_message(&[3; HANDSHAKE_BYTES], &mut nothing).unwrap_err();
    }
    println!("a stranger's first message: {:.1} us", (now() - begin) / 200.0 * 1e6);
}
