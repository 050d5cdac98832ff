use std::process::{Child, Command, Stdio};

use super::stat::parse;
use super::*;

#[test]
fn a_name_with_parentheses_does_not_confuse_stat() {
    let line = b"42 (a) R 1 (b) S 1 2 3 4 5 4194308 7 8 9 10 11 12 13 14 15 16 17 18 987654 20\n";
    let stat = parse(line).unwrap();
    assert_eq!((stat.state, stat.start, stat.exiting, stat.threads), (b'S', 987_654, true, 17));
    assert!(parse(b"").is_none());
    assert!(parse(b"1 (x)").is_none());
    assert!(parse(b"1 (x) S 1 2").is_none());
}

fn without_descriptor(id: ProcessId) -> Arc<Process> {
    Arc::new(Process {
        id,
        pidfd: None,
        looked: AtomicU64::new(0),
        read: AtomicU64::new(0),
        is_dead: AtomicBool::new(false),
    })
}

fn start_sleep() -> (Child, ProcessId) {
    let child = Command::new("sleep").arg("100").stdin(Stdio::null()).spawn().unwrap();
    let id = ProcessId { pid: child.id(), start: stat(child.id()).unwrap().start };
    (child, id)
}

#[test]
fn the_ends_of_more_processes_than_have_descriptors_are_seen() {
    let mut children: Vec<(Child, ProcessId)> = (0..MOST_HELD + 8).map(|_| start_sleep()).collect();
    let watched: Vec<Arc<Process>> = children.iter().map(|(_, id)| Process::watch(*id)).collect();
    let held = watched.iter().filter(|process| process.pidfd.is_some()).count();
    // Other tests of this process watch processes, too.
    assert!(held > 0 && held <= MOST_HELD, "{held}");
    let mut alive: Vec<usize> = (0..watched.len()).collect();
    // The last ones have no descriptor.
    for victim in [0, MOST_HELD + 7, MOST_HELD + 3] {
        let list = |alive: &[usize]| alive.iter().map(|at| watched[*at].clone()).collect::<Vec<_>>();
        assert_eq!(Process::first_dead_in_turn(&list(&alive)), None);
        children[victim].0.kill().unwrap();
        let started = Instant::now();
        let found = loop {
            if let Some(found) = Process::first_dead_in_turn(&list(&alive)) {
                break alive[found];
            }
            assert!(started.elapsed() < Duration::from_secs(10), "the end of {victim} was not seen");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(found, victim);
        assert_eq!(Process::first_dead(&list(&alive)).map(|at| alive[at]), Some(victim), "it stays dead");
        alive.retain(|at| *at != victim);
    }
    for (child, _) in &mut children {
        let _ = child.kill();
        child.wait().unwrap();
    }
}

#[test]
fn a_process_whose_number_was_reused_long_ago_is_dead() {
    let (mut child, mut id) = start_sleep();
    id.start += 1;
    assert_eq!(Process::first_dead_in_turn(&[without_descriptor(id)]), Some(0));
    // The number can change hands between two looks, too. The start time is not read at each look.
    let looked_at = without_descriptor(id);
    let a_second = Duration::from_secs(1);
    let a_second_ago = loop {
        let began = since_start() - a_second;
        let a_second_ago = began.as_millis() as u64;
        looked_at.looked.store(a_second_ago, Ordering::Relaxed);
        looked_at.read.store(a_second_ago, Ordering::Relaxed);
        let dead = Process::first_dead_in_turn(std::slice::from_ref(&looked_at));
        // On a busy machine, the look may come too late.
        if since_start() - began < LONG_AGO {
            assert_eq!(dead, None);
            break a_second_ago;
        }
    };
    looked_at.looked.store(a_second_ago, Ordering::Relaxed);
    looked_at.read.store(0, Ordering::Relaxed);
    assert_eq!(Process::first_dead_in_turn(&[looked_at]), Some(0));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_child_is_dead_while_still_a_zombie() {
    let (mut child, id) = start_sleep();
    let watched = Process::watch(id);
    let without_fd = without_descriptor(id);
    assert!(Arc::ptr_eq(&watched, &Process::watch(id)), "one descriptor for each process");
    assert_eq!(Process::first_dead(&[watched.clone(), without_fd.clone()]), None);
    child.kill().unwrap();
    let started = Instant::now();
    let dead = |process| Process::first_dead(std::slice::from_ref(process)).is_some();
    while !dead(&watched) || !dead(&without_fd) {
        assert!(started.elapsed() < Duration::from_secs(10), "the death was not seen");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(exists(id.pid), "a zombie still has its number");
    child.wait().unwrap();
    assert!(!exists(id.pid));
    assert_eq!(Process::first_dead(&[watched]), Some(0));
}

/// A process has its number until its parent has waited for it. Here one thread waits for the
/// child, and this thread asks about the child at the same time.
#[test]
fn a_process_that_is_ending_stays_so_while_its_parent_takes_its_number_away() {
    for _ in 0..300 {
        let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
        let id = ProcessId { pid: child.id(), start: stat(child.id()).unwrap().start };
        let parent = std::thread::spawn(move || child.wait().unwrap());
        let started = Instant::now();
        while !id.is_ending() {
            assert!(started.elapsed() < Duration::from_secs(10), "the end was not seen");
        }
        while !parent.is_finished() {
            assert!(id.is_ending(), "the process was ending, and then it was not");
        }
        parent.join().unwrap();
        assert!(id.is_ending());
    }
}

#[test]
fn a_later_process_of_the_same_number_is_another_one() {
    let mut id = ProcessId::current();
    assert!(id.lives() && !id.is_ending());
    id.start += 1;
    assert_eq!(Process::first_dead(&[Process::watch(id)]), Some(0));
}

/// A child process whose main thread ends, as by `pthread_exit`, while another thread lives. The
/// main thread belongs to the test harness, so a signal ends it.
#[test]
#[ignore = "started by another test as a process"]
fn child_without_a_main_thread() {
    extern "C" fn end_thread(_: libc::c_int) {
        // SAFETY: this ends the calling thread alone, which runs nothing any more.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    std::thread::spawn(|| {
        std::io::stdin().read_line(&mut String::new()).unwrap();
        std::process::exit(0);
    });
    let handler: extern "C" fn(libc::c_int) = end_thread;
    let pid = std::process::id() as libc::pid_t;
    // SAFETY: the handler calls nothing that a signal could interrupt.
    unsafe { libc::signal(libc::SIGUSR1, handler as usize) };
    // SAFETY: the call only sends a signal to the main thread.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, libc::SIGUSR1) };
    std::thread::park();
}

#[test]
fn a_process_whose_main_thread_has_ended_lives_while_another_thread_lives() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process::tests::child_without_a_main_thread", "--ignored", "--test-threads=1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let id = ProcessId { pid: child.id(), start: stat(child.id()).unwrap().start };
    let started = Instant::now();
    let wait_until = |condition: &dyn Fn() -> bool| {
        while !condition() {
            assert!(started.elapsed() < Duration::from_secs(20), "this takes too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait_until(&|| stat(id.pid).unwrap().has_ended());
    let (watched, without_fd) = (Process::watch(id), without_descriptor(id));
    assert!(id.has_its_number(), "otherwise the descriptor of the process would not be kept");
    for process in [&watched, &without_fd] {
        assert_eq!(Process::first_dead(std::slice::from_ref(process)), None);
        assert_eq!(Process::first_dead_in_turn(std::slice::from_ref(process)), None);
    }
    assert!(!id.is_ending());
    child.kill().unwrap();
    for process in [&watched, &without_fd] {
        wait_until(&|| Process::first_dead(std::slice::from_ref(process)).is_some());
    }
    wait_until(&|| id.is_ending());
    assert!(exists(id.pid), "a zombie still has its number");
    child.wait().unwrap();
    assert!(id.is_ending());
}
