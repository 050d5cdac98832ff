//! Finds rank, size and the store's address in the environment that a launcher sets.
//!
//! The first match counts: torchrun and everything that sets PyTorch's RANK, Open MPI, PALS, PMI
//! (MPICH, Intel MPI), PMIx, a Slurm step, a Kubernetes indexed job, or a process alone. The
//! variables are those that torchrun, JAX (jax/_src/clusters) and torchcomms use, checked against
//! what Open MPI 4.1, MPICH 4.0 and Slurm 22.05 really set; docs/interop.md says what was run. A
//! Slurm batch script is no step, so it is a process alone: its tasks belong to srun.
//!
//! TORCHELASTIC_RESTART_COUNT does not tell the attempts of a job apart: when one of several agents
//! starts its ranks again, only that agent counts the restart.
//!
//! The ranks meet at MASTER_ADDR and MASTER_PORT if these are set. Otherwise they meet at the first
//! host of a Slurm step, or at this host when all ranks are on it. The port is from 61440 to 65535
//! then, and is made from the job's identity.

mod family;
mod meeting;
mod nodelist;
#[cfg(test)]
mod tests;
mod variables;

pub use nodelist::first_host;

use crate::error::{Error, Result};
use family::{Family, KUBERNETES, MPI, SLURM, TORCH, partial};
use variables::{Number, Variables};

/// The variable by which the ranks of `devicemesh run` differ from those of torchrun. Its value is
/// the job's MASTER_ADDR and MASTER_PORT, as "host:port". Where the store has several jobs, one
/// after the other (`devicemesh run --store`), the number of the job follows: "host:port/7".
pub const STARTED_BY_RUN: &str = "DM_STARTED_BY_RUN";

/// The facts that a launcher states about this process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// This process's rank in the job.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The rank in this host, which chooses the device; `None` where the launcher does not say it.
    pub local_rank: Option<usize>,
    /// The number of ranks on this host; `None` where the launcher does not say it.
    pub local_size: Option<usize>,
    /// The host and the port where the ranks meet.
    pub address: Option<(String, u16)>,
    /// The digest of the job's identity from which the port was made, or the number of the job in a
    /// store that has several jobs; otherwise 0. Jobs that meet at one address keep their keys
    /// apart by this number.
    pub job: u64,
    /// Whether the launcher serves a store at that address already (torchrun's agent,
    /// `devicemesh run`).
    pub agent: bool,
    /// The launcher's name, for messages.
    pub launcher: &'static str,
    /// The advice for the user when there is no address, or its port is taken.
    pub advice: &'static str,
}

/// Finds this process's place in its environment variables, which `get` looks up. Sets of variables
/// that are contradictory or incomplete are errors that name them.
pub fn detect(get: &dyn Fn(&str) -> Option<String>) -> Result<Place> {
    let env = Variables { get };
    let Some(family) = family(&env)? else { return Ok(Place::new("alone", 0, 1, Some(0))) };
    let (rank, size) = rank_and_size(&env, family)?;
    let local_size = local_size(&env, family, size)?;
    let local_rank = match env.first(family.local_rank)?.or(env.number("LOCAL_RANK")?) {
        Some(local) => {
            below(local, local_size.unwrap_or(size))?;
            Some(local.value)
        }
        None => (size.value == 1).then_some(0),
    };
    let mut place = Place::new(family.launcher, rank.value, size.value, local_rank);
    place.local_size = local_size.map(|local| local.value);
    place.advice = family.advice;
    if env.text("TORCHELASTIC_RUN_ID").is_some() && family.rank == TORCH.rank {
        place.launcher = "torchrun";
    }
    place.meet(&env)?;
    // A torchrun that runs under `devicemesh run` has a store of its own, but passes the variable
    // on.
    if place.launcher == "torchrun" && place.is_store_of_run(&env).is_some() {
        place.launcher = "devicemesh run";
    }
    if place.address.is_none() && size.value > 1 {
        let one_host = local_size.is_some_and(|local| local.value == size.value);
        if let Some((address, job)) = meeting::address(&env, family, one_host)? {
            (place.address, place.job) = (Some(address), job);
        }
    }
    Ok(place)
}

/// Returns the name of the job, as the environment has it; empty where it has none.
pub(super) fn job_name() -> String {
    let env = |name: &str| std::env::var(name).ok().filter(|value| !matches!(value.as_str(), "" | "none"));
    let name = env("TORCHELASTIC_RUN_ID").or_else(|| Some(format!("slurm-{}", env("SLURM_JOB_ID")?)));
    name.or_else(|| env("PMIX_NAMESPACE")).unwrap_or_default()
}

/// Makes the place of explicit options, which say which rank this is. The environment may still say
/// where the ranks meet: by MASTER_ADDR and MASTER_PORT, or by its launcher's variables where they
/// name the same rank and size.
pub fn given(
    get: &dyn Fn(&str) -> Option<String>,
    rank: usize,
    size: usize,
    local_rank: Option<usize>,
) -> Result<Place> {
    let mut place = Place::new("dm_world_options", rank, size, local_rank);
    place.meet(&Variables { get })?;
    if place.address.is_none() {
        match detect(get) {
            Ok(theirs) if (theirs.rank, theirs.size) == (rank, size) => {
                (place.address, place.job, place.advice) = (theirs.address, theirs.job, theirs.advice);
            }
            _ => {}
        }
    }
    Ok(place)
}

impl Place {
    /// Makes a place with a rank and a size, and no address.
    pub fn new(launcher: &'static str, rank: usize, size: usize, local_rank: Option<usize>) -> Place {
        let (address, job, agent, advice) = (None, 0, false, TORCH.advice);
        Place { rank, size, local_rank, local_size: None, address, job, agent, launcher, advice }
    }

    /// Adds advice to the error that the port cannot be used, where the port was made from the
    /// job's id.
    pub fn taken(&self, error: Error) -> Error {
        if self.job == 0 {
            return error;
        }
        let message =
            format!("{}; the port was made from the job's id ({}): {}", error.message(), self.launcher, self.advice);
        Error::new(error.status(), message).with_os_error(error.os_error())
    }

    /// Reads the address that torchrun and users give.
    fn meet(&mut self, env: &Variables) -> Result<()> {
        self.address = env.master()?;
        self.agent = env.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        self.job = self.is_store_of_run(env).filter(|_| self.agent).unwrap_or(0);
        Ok(())
    }

    /// Returns the number of the job in the store of a `devicemesh run`, or 0 where that store has
    /// one job alone; `None` where the address is not that of such a store.
    fn is_store_of_run(&self, env: &Variables) -> Option<u64> {
        let (host, port) = self.address.as_ref()?;
        let store = env.text(STARTED_BY_RUN)?;
        let rest = store.strip_prefix(&format!("{host}:{port}"))?;
        if rest.is_empty() { Some(0) } else { rest.strip_prefix('/')?.parse().ok() }
    }
}

/// Returns the launcher whose variables count.
fn family(env: &Variables) -> Result<Option<&'static Family>> {
    let set = |name: &&str| env.text(name).is_some();
    if set(&TORCH.rank) {
        return Ok(Some(&TORCH));
    }
    let step = set(&"SLURM_STEP_NODELIST"); // a batch script has none: it is one process, whatever SLURM_NTASKS says
    let mpi = MPI.iter().find(|family| set(&family.rank) || family.size.first().is_some_and(set));
    match mpi {
        Some(family) if !(step && srun_speaks(env, family)) => Ok(Some(family)),
        _ if step => Ok(Some(&SLURM)),
        _ if set(&KUBERNETES.rank) => Ok(Some(&KUBERNETES)),
        _ if set(&"WORLD_SIZE") => Err(partial(&TORCH, "WORLD_SIZE", "RANK", env)),
        _ => Ok(None),
    }
}

/// Whether these are variables of srun's own PMI. They are if they name Slurm's step (`4.0`,
/// `slurm.pmix.4.0`) and no MPICH is in between.
fn srun_speaks(env: &Variables, family: &Family) -> bool {
    let part = |name| env.text(name).unwrap_or_default();
    let step = format!("{}.{}", part("SLURM_JOB_ID"), part("SLURM_STEP_ID"));
    let names_it = |name: &&str| env.text(name).is_some_and(|value| value.ends_with(&step));
    env.text("MPI_LOCALRANKID").is_none() && family.job.iter().any(names_it)
}

/// Returns the rank and the number of ranks. WORLD_SIZE counts where the launcher has no variable
/// for the size. Where the launcher has such a variable, WORLD_SIZE must be equal to it.
fn rank_and_size<'a>(env: &Variables, family: &'a Family) -> Result<(Number<'a>, Number<'a>)> {
    let (size, world) = (env.first(family.size)?, env.number("WORLD_SIZE")?);
    let Some(rank) = env.number(family.rank)? else {
        return Err(partial(family, family.size[0], family.rank, env));
    };
    let Some(size) = size.or(world) else {
        let others = family.size.iter().filter(|name| **name != "WORLD_SIZE");
        return Err(Error::invalid(format!(
            "environment variable {rank} ({}), but {} is not set: nothing says how many ranks there are (1 for a process that works alone)",
            family.launcher,
            others.copied().chain(["WORLD_SIZE"]).collect::<Vec<_>>().join(" or ")
        )));
    };
    if let Some(world) = world.filter(|world| world.value != size.value) {
        return Err(contradiction(world, size));
    }
    below(rank, size)?;
    Ok((rank, size))
}

/// Returns how many of the ranks are on this host, where the launcher says so.
fn local_size<'a>(env: &Variables, family: &'a Family, size: Number<'a>) -> Result<Option<Number<'a>>> {
    if family.rank == SLURM.rank && env.number("SLURM_STEP_NUM_NODES")?.is_some_and(|nodes| nodes.value == 1) {
        return Ok(Some(size));
    }
    match env.first(family.local_size)?.or(env.number("LOCAL_WORLD_SIZE")?) {
        Some(local) if local.value == 0 || local.value > size.value => Err(contradiction(local, size)),
        local => Ok(local),
    }
}

/// Checks that a rank is below its size.
fn below(rank: Number, size: Number) -> Result<()> {
    if rank.value < size.value { Ok(()) } else { Err(contradiction(rank, size)) }
}

fn contradiction(one: Number, other: Number) -> Error {
    Error::invalid(format!("environment variables contradict: {one}, but {other}"))
}
