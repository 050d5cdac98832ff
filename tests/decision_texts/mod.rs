//! The check of decisions as text that the tests and the fuzz target share.

use devicemesh::rendezvous::Decision;

/// The most seats of a decision, and the most processes of each of its lists.
const MOST: usize = 1 << 20;

/// Reads any text. A text that is read is the one that the decision is written as, and it names no
/// more processes than a text may.
pub fn check_any_text(text: &str) {
    let Ok(decision) = text.parse::<Decision>() else { return };
    assert_eq!(decision.to_string(), text);
    match decision {
        Decision::Epoch(epoch) => {
            assert!(epoch.seats.len() <= MOST && epoch.spares.len() <= MOST, "{text}");
            assert_eq!(epoch.seats.len(), epoch.replicas.num_seats(), "{text}");
            assert!(epoch.without.len() < epoch.replicas.count(), "{text}");
            let (members, in_mesh) = (epoch.members(), epoch.in_mesh());
            assert!(in_mesh.is_subset(&members) && !in_mesh.is_empty(), "{text}");
            assert!(epoch.stateless.iter().all(|process| in_mesh.contains(process)), "{text}");
            let out = epoch.taken.iter().chain(&epoch.refused);
            assert!(out.into_iter().all(|process| !members.contains(process)), "{text}");
        }
        Decision::Failure(failure) => assert!(!failure.error().message().is_empty(), "{text}"),
        Decision::End => {}
    }
}
