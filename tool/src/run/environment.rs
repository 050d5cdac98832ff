//! The variables that a rank gets beside those of the tool. They are torchrun's. A rank of another
//! job may have started the tool. The variables of that job say nothing about this one.

use devicemesh::rendezvous::launcher::STARTED_BY_RUN;
use devicemesh::rendezvous::store::RELAY;

use super::assignment::Assignment;

/// The variable that names the store of a service.
pub const STORE: &str = "DM_STORE";
/// Tells a rank that it joins a running job.
pub const JOIN: &str = "DM_JOIN";
/// The number of ranks without spares.
pub const MESH_SIZE: &str = "DM_MESH_SIZE";

/// Whether a rank of another job has started this tool. `get` gives the value of a variable that is
/// not empty.
pub fn is_in_rank(get: &dyn Fn(&str) -> Option<String>) -> bool {
    get("RANK").is_some() && get("TORCHELASTIC_RUN_ID").is_some()
}

/// Returns the value of a variable of this tool that is not empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The variables that the tool has and its ranks do not get: the relay of another job, and, where a
/// rank of another job runs the tool, DM_JOIN and DM_STORE. Elsewhere the user may have set the
/// latter two for this job.
pub fn not_inherited() -> impl Iterator<Item = &'static str> {
    let of_another_job: &[&str] = if is_in_rank(&variable) { &[JOIN, STORE] } else { &[] };
    [RELAY].into_iter().chain(of_another_job.iter().copied())
}

/// The variables of a rank of this node. `own_cores` is the number of cores that the rank has for
/// itself, where it has any. `again` is how often the rank was started again alone.
pub fn variables(
    local_rank: u32,
    again: u32,
    assignment: &Assignment,
    own_cores: Option<usize>,
) -> Vec<(&'static str, String)> {
    let rank = assignment.rank(local_rank);
    // The library keeps the keys of the jobs in a store apart by this number.
    let job = assignment.job.map_or(String::new(), |job| format!("/{job}"));
    let mut variables = vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("ROLE_RANK", rank.to_string()),
        ("WORLD_SIZE", assignment.world_size.to_string()),
        ("LOCAL_WORLD_SIZE", assignment.ranks.to_string()),
        ("ROLE_WORLD_SIZE", assignment.world_size.to_string()),
        ("GROUP_RANK", assignment.node.to_string()),
        ("GROUP_WORLD_SIZE", assignment.nodes.to_string()),
        ("ROLE_NAME", "default".to_owned()),
        ("MASTER_ADDR", assignment.host.clone()),
        ("MASTER_PORT", assignment.port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", (assignment.restarts + assignment.rejoins + again).to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", assignment.max_restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", assignment.id.clone()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        (STARTED_BY_RUN, format!("{}:{}{job}", assignment.host, assignment.port)),
        (MESH_SIZE, assignment.mesh_size.to_string()),
    ];
    if again + assignment.rejoins > 0 {
        variables.push((JOIN, "running".to_owned()));
    }
    variables.extend(assignment.relay.clone().map(|relay| (RELAY, relay)));
    // Otherwise each rank would start a thread for every CPU.
    let threads = own_cores.or((assignment.ranks > 1).then_some(1));
    if let Some(threads) = threads.filter(|_| std::env::var_os("OMP_NUM_THREADS").is_none()) {
        variables.push(("OMP_NUM_THREADS", threads.to_string()));
    }
    variables
}
