//! The comparison of collectives before they are issued.

use super::*;
use crate::rendezvous::agreement::check_order;

/// The scopes of two dimensions of a world with one rank.
fn dims(store: &MemoryStore) -> [Arc<Scope>; 2] {
    let store: Arc<dyn Store> = Arc::new(store.clone());
    let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
    ["test/dp", "test/tp"].map(|prefix| {
        let membership = membership(Arc::clone(&store), Arc::clone(&losses), Members::All(1), 0);
        Arc::new(Scope::new(membership, prefix.to_owned()).for_order())
    })
}

fn call(scope: &Arc<Scope>) -> (Arc<Scope>, Vec<String>) {
    (Arc::clone(scope), vec!["all-reduce of 8 float32 (sum)".to_owned()])
}

/// A group ends with the first verdict. The keys of earlier calls along its other dimensions are
/// removed after a later call.
#[test]
fn a_group_keeps_the_names_of_keys_that_it_does_not_remove() {
    let [dp, tp] = dims(&MemoryStore::new());
    check_order(&[call(&tp)], &soon()).unwrap();
    let earlier = tp.membership.left.take();
    assert!(!earlier.is_empty());
    tp.membership.left.note(earlier.iter().cloned());
    check_order(&[call(&dp), call(&tp)], &soon()).unwrap();
    let now = tp.membership.left.take();
    assert!(earlier.iter().all(|key| now.contains(key)), "{earlier:?} {now:?}");
}

#[test]
fn a_group_over_two_worlds_fails_at_once() {
    let ([first, _], [other, _]) = (dims(&MemoryStore::new()), dims(&MemoryStore::new()));
    let error = check_order(&[call(&first), call(&other)], &soon()).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
    assert!(error.message().contains("collectives of several worlds"), "{error:?}");
    // No call was announced, so the next one has the number of the first.
    check_order(&[call(&first)], &soon()).unwrap();
}
