use std::time::Duration;

use super::questions::Answered;
use super::*;
use crate::ccl;
use crate::mesh::MeshSpec;

/// A handle of the host engine with a raw communicator that the engine does not know.
fn handle() -> (Arc<Handle>, RawComm) {
    let group = Mesh::new(&MeshSpec::new("cpu", &[1], 1, 0)).unwrap();
    let handle = Handle::new(ccl::for_device("cpu").unwrap(), group, true);
    (handle, RawComm(ptr::without_provenance_mut(16)))
}

fn enter(handle: &Arc<Handle>) -> Inside {
    handle.enter(7, || Wait::after(Duration::ZERO), &String::new).unwrap();
    Inside::of(handle)
}

fn ask(handle: &Arc<Handle>) -> Answered {
    handle.is_asked.store(true, Ordering::SeqCst);
    Answered(Arc::clone(handle))
}

/// Takes the raw communicator on another thread while `inside` is there, which then leaves.
fn take_after<T>(handle: &Arc<Handle>, inside: T) -> Option<RawComm> {
    std::thread::scope(|scope| {
        let taker = scope.spawn(|| handle.take(&Deadline::after(Duration::from_secs(60))));
        while !handle.raw().is_null() {
            std::thread::yield_now();
        }
        drop(inside);
        taker.join().unwrap().unwrap()
    })
}

#[test]
fn whoever_leaves_does_not_abort_what_another_thread_ends_in_order() {
    let (handle, raw) = handle();
    for round in 0..20 {
        handle.set(raw);
        assert_eq!(take_after(&handle, enter(&handle)), Some(raw), "round {round}, after a call");
        handle.set(raw);
        assert_eq!(take_after(&handle, ask(&handle)), Some(raw), "round {round}, after a question");
    }
}

#[test]
fn whoever_leaves_after_the_deadline_aborts() {
    let (handle, raw) = handle();
    handle.set(raw);
    let inside = enter(&handle);
    assert!(handle.take(&Deadline::after(Duration::from_millis(1))).is_err());
    assert!(!handle.has_ended());
    drop(inside);
    assert!(handle.has_ended());
}
