//! The environment variables of each launcher.

use super::variables::Variables;
use crate::error::Error;

/// The environment variables of one launcher. Where there are several names, the first one that is
/// set counts.
pub(super) struct Family {
    /// The launcher's name, for messages.
    pub(super) launcher: &'static str,
    /// The variable that holds the rank. This variable shows which launcher it is.
    pub(super) rank: &'static str,
    /// The variables that hold the number of ranks.
    pub(super) size: &'static [&'static str],
    /// The variables that hold the rank in the host.
    pub(super) local_rank: &'static [&'static str],
    /// The variables that hold the number of ranks in the host.
    pub(super) local_size: &'static [&'static str],
    /// Variables whose values, taken together, are equal on all ranks of a job. No two jobs have
    /// equal values at one time on one host.
    pub(super) job: &'static [&'static str],
    /// The advice for the user when there is no address, or its port is taken.
    pub(super) advice: &'static str,
}

pub(super) const TORCH: Family = Family {
    launcher: "the environment",
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local_rank: &[],
    local_size: &[],
    job: &[],
    advice: "set MASTER_ADDR (rank 0's host) and MASTER_PORT, or dm_world_options.init_method",
};

pub(super) const MPI: [Family; 4] = [
    Family {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        advice: "start it as mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT (rank 0's host, a free port there), or set dm_world_options.init_method",
    },
    // No PALS is known to set PALS_SIZE. torchcomms and Aurora's users take the size from
    // elsewhere.
    Family {
        launcher: "PALS",
        rank: "PALS_RANKID",
        size: &["PALS_SIZE", "PMI_SIZE"],
        local_rank: &["PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"],
        local_size: &["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"],
        job: &["PALS_APID"],
        advice: "set MASTER_ADDR (rank 0's host) and MASTER_PORT for all ranks, or dm_world_options.init_method",
    },
    Family {
        launcher: "PMI",
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        job: &["PMI_JOBID"],
        advice: "start it as mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT (rank 0's host, a free port there), or set dm_world_options.init_method",
    },
    // PMIx itself has no variable for the size. An Open MPI program without mpirun makes itself
    // rank 0 of 1 in MPI_Init.
    Family {
        launcher: "PMIx",
        rank: "PMIX_RANK",
        size: &["PMIX_SIZE", "OMPI_MCA_orte_ess_num_procs"],
        local_rank: &[],
        local_size: &[],
        job: &["PMIX_NAMESPACE"],
        advice: "set MASTER_ADDR (rank 0's host) and MASTER_PORT for all ranks, or dm_world_options.init_method",
    },
];

/// The step's variable comes first, because SLURM_NTASKS may count the tasks of the whole job, and
/// the step may have fewer.
pub(super) const SLURM: Family = Family {
    launcher: "Slurm",
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: &["SLURM_LOCALID"],
    local_size: &[],
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    advice: "export MASTER_ADDR (rank 0's host) and MASTER_PORT before srun, or set dm_world_options.init_method",
};

/// Kubernetes does not tell a pod how many pods there are, so WORLD_SIZE must be set.
pub(super) const KUBERNETES: Family = Family {
    launcher: "Kubernetes",
    rank: "JOB_COMPLETION_INDEX",
    size: &[],
    local_rank: &[],
    local_size: &[],
    job: &[],
    advice: "set MASTER_ADDR (pod 0's name: JOB-0.SERVICE with a headless service) and MASTER_PORT in the pod template, or dm_world_options.init_method",
};

/// Returns the error that only one of two variables is set.
pub(super) fn partial(family: &Family, there: &str, missing: &str, env: &Variables) -> Error {
    let value = env.text(there).unwrap_or_default();
    Error::invalid(format!(
        "environment variable {there} is {value} ({}), but {missing} is not set: set both or neither",
        family.launcher
    ))
}
