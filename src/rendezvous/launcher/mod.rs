//! Rank, size and the store's address from the environment that a launcher sets.
//!
//! First match: torchrun and everything that sets PyTorch's RANK, Open MPI, PALS, PMI (MPICH, Intel MPI), PMIx, a Slurm step, a Kubernetes indexed
//! job, alone. The variables are those that torchrun, JAX (jax/_src/clusters) and torchcomms go by, checked against what Open MPI 4.1, MPICH 4.0
//! and Slurm 22.05 really set; docs/interop.md says what was run. A Slurm batch script is no step, so it is alone: its tasks are srun's.
//!
//! TORCHELASTIC_RESTART_COUNT is of no use to keep the attempts of a job apart: when one of several agents starts its ranks again, it alone counts.
//!
//! Where the ranks meet is MASTER_ADDR and MASTER_PORT, always; else the first host of a Slurm step; else this host when all ranks are on it.
//! The port is then 61440 to 65535, made from the job's identity.

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

/// What a launcher says about this process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// This process's rank in the job.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank in this host, which chooses the device. Where nobody says: the rank (modulo LOCAL_WORLD_SIZE), as PyTorch's DeviceMesh does.
    pub local_rank: usize,
    /// Where the ranks meet: host and port.
    pub address: Option<(String, u16)>,
    /// Digest of the job's identity that the port was made from, 0 where it was not: jobs whose ports collide keep their keys apart by it.
    pub job: u64,
    /// Whether the launcher serves a store there already (torchrun's agent, `devicemesh run`).
    pub agent: bool,
    /// Who started this process, for messages.
    pub launcher: &'static str,
    /// What to set where there is no address, or its port is taken.
    pub advice: &'static str,
}

/// The process's place by its environment variables, which `get` looks up. Contradictory or partial sets are errors that name them.
pub fn detect(get: &dyn Fn(&str) -> Option<String>) -> Result<Place> {
    let env = Variables { get };
    let Some(family) = family(&env)? else { return Ok(Place::new("alone", 0, 1, 0)) };
    let (rank, size) = rank_and_size(&env, family)?;
    let local_size = local_size(&env, family, size)?;
    let local_rank = match env.first(family.local_rank)?.or(env.number("LOCAL_RANK")?) {
        Some(local) => {
            below(local, local_size.unwrap_or(size))?;
            local.value
        }
        // Each pod sees the devices that it was given.
        None if family.rank == KUBERNETES.rank => 0,
        None => rank.value % local_size.map_or(usize::MAX, |local| local.value),
    };
    let mut place = Place::new(family.launcher, rank.value, size.value, local_rank);
    place.advice = family.advice;
    if env.text("TORCHELASTIC_RUN_ID").is_some() && family.rank == TORCH.rank {
        place.launcher = "torchrun";
    }
    place.meet(&env)?;
    if place.address.is_none() && size.value > 1 {
        let one_host = local_size.is_some_and(|local| local.value == size.value);
        if let Some((address, job)) = meeting::address(&env, family, one_host)? {
            (place.address, place.job) = (Some(address), job);
        }
    }
    Ok(place)
}

/// The place of explicit options: they say who. The environment may still say where: MASTER_ADDR and MASTER_PORT, or what its launcher gives this very
/// rank of this very size.
pub fn given(get: &dyn Fn(&str) -> Option<String>, rank: usize, size: usize, local_rank: usize) -> Result<Place> {
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
    /// Rank and size, and no address.
    pub fn new(launcher: &'static str, rank: usize, size: usize, local_rank: usize) -> Place {
        let (address, job, agent, advice) = (None, 0, false, TORCH.advice);
        Place { rank, size, local_rank, address, job, agent, launcher, advice }
    }

    /// That error of listening, with what to do about a port that nobody chose.
    pub fn taken(&self, error: Error) -> Error {
        if self.job == 0 {
            return error;
        }
        let message =
            format!("{}; the port was made from the job's id ({}): {}", error.message(), self.launcher, self.advice);
        Error::new(error.status(), message).with_os_error(error.os_error())
    }

    /// What torchrun and people say about the meeting.
    fn meet(&mut self, env: &Variables) -> Result<()> {
        self.address = env.master()?;
        self.agent = env.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        Ok(())
    }
}

/// Whose variables count.
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

/// Whether these are variables of srun's own PMI: they name Slurm's step (`4.0`, `slurm.pmix.4.0`), and no MPICH came in between.
fn srun_speaks(env: &Variables, family: &Family) -> bool {
    let part = |name| env.text(name).unwrap_or_default();
    let step = format!("{}.{}", part("SLURM_JOB_ID"), part("SLURM_STEP_ID"));
    let names_it = |name: &&str| env.text(name).is_some_and(|value| value.ends_with(&step));
    env.text("MPI_LOCALRANKID").is_none() && family.job.iter().any(names_it)
}

/// The rank and the number of ranks: WORLD_SIZE stands in where the launcher has no variable for it, and contradicts nothing where it has one.
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

/// How many of the ranks are on this host, where the launcher says.
fn local_size<'a>(env: &Variables, family: &'a Family, size: Number<'a>) -> Result<Option<Number<'a>>> {
    if family.rank == SLURM.rank && env.number("SLURM_STEP_NUM_NODES")?.is_some_and(|nodes| nodes.value == 1) {
        return Ok(Some(size));
    }
    match env.first(family.local_size)?.or(env.number("LOCAL_WORLD_SIZE")?) {
        Some(local) if local.value == 0 || local.value > size.value => Err(contradiction(local, size)),
        local => Ok(local),
    }
}

/// A rank is below its size.
fn below(rank: Number, size: Number) -> Result<()> {
    if rank.value < size.value { Ok(()) } else { Err(contradiction(rank, size)) }
}

fn contradiction(one: Number, other: Number) -> Error {
    Error::invalid(format!("environment variables contradict: {one}, but {other}"))
}
