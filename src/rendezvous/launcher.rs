//! Rank, size and store address from the environment that a launcher sets.
//!
//! First match: torchrun and everything that sets PyTorch's variables (also a Kubernetes indexed job), Open MPI, PALS, PMI (MPICH, Intel MPI), Slurm,
//! alone. The variables are those that torchrun, JAX and torchcomms go by.

use crate::error::{Error, Result};

/// What a launcher says about this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// This process's rank in the job.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank in this host, which chooses the device; 0 where nobody says.
    pub local_rank: usize,
    /// Where the ranks meet: host and port.
    pub address: Option<(String, u16)>,
    /// Whether the launcher serves a store there already (torchrun's agent, `devicemesh run`).
    pub agent: bool,
    /// How often the job was restarted: earlier attempts may have left keys in the store.
    pub attempt: u64,
    /// Who started this process, for messages.
    pub launcher: &'static str,
}

/// A family of variables: rank, size, rank in the host.
const FAMILIES: [(&str, &str, &str, &str); 3] = [
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PALS", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
];

/// Ports for Slurm jobs, by job id, as JAX chooses them.
const SLURM_PORTS: (u64, u64) = (61_440, 4096);

/// The process's place by its environment variables, which `get` looks up. Contradictory or partial sets are errors that name them.
pub fn detect(get: &dyn Fn(&str) -> Option<String>) -> Result<Place> {
    let env = Env { get };
    if env.text("WORLD_SIZE").is_some() || env.text("RANK").is_some() {
        let indexed = env.text("RANK").is_none() && env.text("JOB_COMPLETION_INDEX").is_some();
        let rank = if indexed { "JOB_COMPLETION_INDEX" } else { "RANK" };
        let launcher = if env.text("TORCHELASTIC_RUN_ID").is_some() { "torchrun" } else { "the environment" };
        let mut place = env.place(launcher, rank, "WORLD_SIZE", "LOCAL_RANK")?;
        place.agent = env.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        place.attempt = env.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0) as u64;
        return Ok(place);
    }
    for (launcher, rank, size, local_rank) in FAMILIES {
        if env.text(rank).is_some() {
            return env.place(launcher, rank, size, local_rank);
        }
    }
    if env.text("SLURM_PROCID").is_some() && env.text("SLURM_STEP_NODELIST").is_some() {
        let mut place = env.place("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")?;
        if place.address.is_none() {
            let nodes = env.text("SLURM_STEP_NODELIST").unwrap_or_default();
            let job = env.number("SLURM_JOB_ID")?.ok_or_else(|| partial("Slurm", "SLURM_PROCID", "SLURM_JOB_ID"))?;
            let port = SLURM_PORTS.0 + job as u64 % SLURM_PORTS.1;
            place.address = Some((first_host(&nodes)?, port as u16));
        }
        return Ok(place);
    }
    Ok(Place { rank: 0, size: 1, local_rank: 0, address: None, agent: false, attempt: 0, launcher: "alone" })
}

struct Env<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let number = text.trim().parse::<usize>().ok().filter(|number| *number <= i32::MAX as usize);
        number.map(Some).ok_or_else(|| {
            Error::invalid(format!("environment variable {name} is {text:?}, which is no rank or count"))
        })
    }

    fn place(&self, launcher: &'static str, rank: &str, size: &str, local_rank: &str) -> Result<Place> {
        let (rank_value, size_value) = (self.number(rank)?, self.number(size)?);
        let (Some(rank_value), Some(size_value)) = (rank_value, size_value) else {
            let (there, missing) = if rank_value.is_some() { (rank, size) } else { (size, rank) };
            return Err(partial(launcher, there, missing));
        };
        if rank_value >= size_value {
            return Err(Error::invalid(format!(
                "environment variables contradict: {rank} is {rank_value}, but {size} is {size_value}"
            )));
        }
        Ok(Place {
            rank: rank_value,
            size: size_value,
            local_rank: self.number(local_rank)?.unwrap_or(0),
            address: self.address()?,
            agent: false,
            attempt: 0,
            launcher,
        })
    }

    /// MASTER_ADDR and MASTER_PORT: both or neither. An IPv6 address may stand in brackets.
    fn address(&self) -> Result<Option<(String, u16)>> {
        match (self.text("MASTER_ADDR"), self.text("MASTER_PORT")) {
            (Some(host), Some(port)) => match port.trim().parse::<u16>() {
                Ok(port) => {
                    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
                    Ok(Some((bare.unwrap_or(&host).to_owned(), port)))
                }
                Err(_) => {
                    Err(Error::invalid(format!("environment variable MASTER_PORT is {port:?}, which is no port")))
                }
            },
            (None, None) => Ok(None),
            (Some(_), None) => Err(partial("the environment", "MASTER_ADDR", "MASTER_PORT")),
            (None, Some(_)) => Err(partial("the environment", "MASTER_PORT", "MASTER_ADDR")),
        }
    }
}

fn partial(launcher: &str, there: &str, missing: &str) -> Error {
    Error::invalid(format!(
        "environment variable {there} is set ({launcher}), but {missing} is not: set both or neither"
    ))
}

/// The first host of Slurm's compressed list.
///
/// ```
/// use devicemesh::rendezvous::launcher::first_host;
/// assert_eq!(first_host("node[001-004,7],gpu-a").unwrap(), "node001");
/// assert_eq!(first_host("rack2-n[08,10-12]").unwrap(), "rack2-n08");
/// assert_eq!(first_host("gpu-a,node[1-2]").unwrap(), "gpu-a");
/// assert_eq!(first_host("r[1-2]n[3-4]").unwrap(), "r1n3");
/// ```
pub fn first_host(list: &str) -> Result<String> {
    let broken = || Error::invalid(format!("{list:?} is no list of hosts as Slurm writes them"));
    let (mut host, mut rest) = (String::new(), list.trim());
    while let Some(at) = rest.find(['[', ',']) {
        host.push_str(&rest[..at]);
        if rest.as_bytes()[at] == b',' {
            rest = "";
            break;
        }
        let (inside, after) = rest[at + 1..].split_once(']').ok_or_else(broken)?;
        let first = inside.split([',', '-']).next().unwrap_or_default();
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(broken());
        }
        host.push_str(first);
        rest = after;
    }
    host.push_str(rest);
    if host.is_empty() || host.contains(']') { Err(broken()) } else { Ok(host) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place> {
        let variables: Vec<(String, String)> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        detect(&|name| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()))
    }

    #[test]
    fn each_launcher_is_known_by_its_variables() {
        let master = [("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")];
        let cases: [(&str, &[(&str, &str)]); 5] = [
            ("the environment", &[("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")]),
            ("the environment", &[("JOB_COMPLETION_INDEX", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")]),
            (
                "Open MPI",
                &[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")],
            ),
            ("PALS", &[("PALS_RANKID", "3"), ("PALS_SIZE", "8"), ("PALS_LOCAL_RANKID", "1")]),
            ("PMI", &[("PMI_RANK", "3"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "1")]),
        ];
        for (launcher, variables) in cases {
            let place = place(&[variables, &master].concat()).unwrap();
            assert_eq!((place.launcher, place.rank, place.size, place.local_rank), (launcher, 3, 8, 1));
            assert_eq!(place.address, Some(("node1".to_owned(), 29_500)));
        }
    }

    #[test]
    fn torchrun_serves_the_store_and_counts_restarts() {
        let place = place(&[
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "1234"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ])
        .unwrap();
        assert_eq!((place.launcher, place.agent, place.attempt), ("torchrun", true, 2));
    }

    #[test]
    fn slurm_meets_on_its_first_host() {
        let step = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NODELIST", "node[3-5]"),
        ];
        let place_of = place(&[&step[..], &[("SLURM_JOB_ID", "4100")]].concat()).unwrap();
        assert_eq!((place_of.launcher, place_of.address), ("Slurm", Some(("node3".to_owned(), 61_444))));
        assert!(place(&step).unwrap_err().message().contains("SLURM_JOB_ID"));
    }

    #[test]
    fn an_ipv6_address_may_stand_in_brackets() {
        for address in ["fd00::1", "[fd00::1]"] {
            let job = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", address), ("MASTER_PORT", "1")];
            assert_eq!(place(&job).unwrap().address, Some(("fd00::1".to_owned(), 1)));
        }
    }

    #[test]
    fn nothing_set_is_a_job_of_one() {
        assert_eq!(place(&[]).unwrap().launcher, "alone");
    }

    #[test]
    fn partial_and_contradictory_environments_name_their_variables() {
        for (variables, words) in [
            (&[("RANK", "1")][..], &["RANK", "WORLD_SIZE"][..]),
            (&[("WORLD_SIZE", "4")], &["RANK", "WORLD_SIZE"]),
            (&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK is 4", "WORLD_SIZE is 4"]),
            (&[("RANK", "x"), ("WORLD_SIZE", "4")], &["RANK", "\"x\""]),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], &["MASTER_ADDR", "MASTER_PORT"]),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")],
                &["MASTER_PORT", "99999"],
            ),
            (&[("OMPI_COMM_WORLD_RANK", "0")], &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]),
        ] {
            let error = place(variables).unwrap_err();
            assert!(words.iter().all(|word| error.message().contains(word)), "{variables:?}: {error}");
        }
    }

    #[test]
    fn broken_host_lists_are_refused() {
        for list in ["", "node[1-2", "node[]", "node[a]", ",b", "node]"] {
            assert!(first_host(list).is_err(), "{list:?}");
        }
    }
}
