//! Reads what the launcher of this tool says about the nodes of the job. The launcher is a Slurm
//! step with one tool on each node, or a Kubernetes indexed job with one tool in each pod.

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::launcher::detect;

use super::environment::is_in_rank;
use super::nodelist::expand;
use crate::words::count;

/// The port where a Kubernetes job meets. The pods have addresses of their own, so no other job has
/// it.
const KUBERNETES_PORT: u16 = 29400;
/// The least of Slurm's numbers for steps that no srun of the user has started: the batch script,
/// the interactive shell of salloc, and others.
const SPECIAL_STEPS: u32 = 0xffff_fff0;

pub enum Launcher {
    /// This tool is a task of a step that srun started.
    Step { job: String, step: String, nodes: u32, node: u32, tasks: u32, list: String },
    /// This tool is in a batch script or in the shell of salloc.
    Allocation { job: String, nodes: u32, list: String },
    /// This tool is in a pod with the number `index`. `names` is the text of the pod's /etc/hosts.
    Kubernetes { index: u32, host: String, names: String },
}

/// This node's place in the job.
pub struct Place {
    pub nodes: u32,
    pub node: u32,
    /// Where the nodes meet.
    pub host: String,
    pub port: u16,
    /// The job's name.
    pub id: String,
    /// The name of each node's host, where they are known.
    pub hosts: Vec<String>,
    /// See [`super::rendezvous::Rendezvous::all_report`].
    pub all_report: bool,
    /// See [`super::rendezvous::Rendezvous::name_comes_late`].
    pub name_comes_late: bool,
}

impl Launcher {
    pub fn from_environment() -> Option<Launcher> {
        Launcher::find(&|name| std::env::var(name).ok())
    }

    fn find(get: &dyn Fn(&str) -> Option<String>) -> Option<Launcher> {
        let text = |name: &str| get(name).filter(|value| !value.is_empty());
        let number = |name: &str| text(name)?.trim().parse::<u32>().ok();
        // The other job's launcher says nothing about this tool.
        if is_in_rank(&text) {
            return None;
        }
        if let Some(job) = text("SLURM_JOB_ID") {
            let step = text("SLURM_STEP_ID").filter(|step| step.parse().is_ok_and(|step: u32| step < SPECIAL_STEPS));
            if let (Some(step), Some(list)) = (step, text("SLURM_STEP_NODELIST")) {
                let (nodes, node) = (number("SLURM_STEP_NUM_NODES")?, number("SLURM_NODEID")?);
                let tasks = number("SLURM_STEP_NUM_TASKS")?;
                return Some(Launcher::Step { job, step, nodes, node, tasks, list });
            }
            let nodes = number("SLURM_JOB_NUM_NODES").or(number("SLURM_NNODES"))?;
            return Some(Launcher::Allocation { job, nodes, list: text("SLURM_JOB_NODELIST").unwrap_or_default() });
        }
        let index = number("JOB_COMPLETION_INDEX")?;
        let names = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
        Some(Launcher::Kubernetes { index, host: host_name(), names })
    }

    /// The scheduler's name for the job, the same on all of its hosts.
    pub fn job_name(&self) -> Option<String> {
        match self {
            Launcher::Step { job, .. } | Launcher::Allocation { job, .. } => Some(format!("Slurm job {job}")),
            Launcher::Kubernetes { .. } => None,
        }
    }

    /// Returns this node's place in a job whose `--nnodes` is `nnodes`, or `None` where the
    /// launcher started this tool alone.
    pub fn place(&self, nnodes: Option<u32>) -> Result<Option<Place>, String> {
        match self {
            Launcher::Step { nodes: 1, tasks: 1, .. } | Launcher::Allocation { nodes: 1, .. } => Ok(None),
            Launcher::Step { nodes, .. } if nnodes.is_some_and(|count| count != *nodes) => Err(format!(
                "--nnodes {}, and this Slurm step has {nodes} nodes: leave --nnodes out, or say with --rdzv-endpoint where the nodes meet",
                nnodes.unwrap_or_default()
            )),
            Launcher::Step { nodes, tasks, .. } if tasks != nodes => Err(format!(
                "this Slurm step has {tasks} tasks on {}, and devicemesh run starts the ranks of a node itself: srun --ntasks-per-node 1 devicemesh run -n N -- PROGRAM; or --nnodes 1 for a job in each task",
                count(*nodes, "node")
            )),
            Launcher::Step { job, step, nodes, node, list, .. } => {
                // The library makes the port from the job and the step. The other launchers'
                // variables are hidden from it, because Slurm started this tool.
                let get = |name: &str| name.starts_with("SLURM_").then(|| std::env::var(name).ok()).flatten();
                let place = detect(&get).map_err(|error| error.message().to_owned())?;
                let (host, port) = place.address.ok_or("Slurm names no host for this step: give --rdzv-endpoint")?;
                let hosts = expand(list).unwrap_or_default();
                let id = format!("slurm-{job}.{step}");
                Ok(Some(Place {
                    nodes: *nodes,
                    node: *node,
                    host,
                    port,
                    id,
                    hosts,
                    all_report: false,
                    name_comes_late: false,
                }))
            }
            Launcher::Allocation { nodes, list, .. } if nnodes.is_none() => Err(format!(
                "this Slurm allocation has {nodes} nodes ({list}), and nobody has started devicemesh run on the others: srun --ntasks-per-node 1 devicemesh run ... does; or --nnodes 1 for this node alone"
            )),
            Launcher::Allocation { .. } => Ok(None),
            Launcher::Kubernetes { index, host, names } => {
                let Some(nodes) = nnodes else {
                    return Err(format!(
                        "JOB_COMPLETION_INDEX is {index}, and Kubernetes does not tell a pod how many pods there are: give --nnodes N with the job's completions, or --nnodes 1 for a job in each pod"
                    ));
                };
                let (job, domain) = service(*index, host, names).ok_or_else(|| {
                    format!("the pod {host} has no name for the others: set `subdomain` in the pod template to a headless service, or give --rdzv-endpoint")
                })?;
                Ok(Some(Place {
                    nodes,
                    node: *index,
                    host: format!("{job}-0.{domain}"),
                    port: KUBERNETES_PORT,
                    id: format!("kubernetes-{job}"),
                    hosts: (0..nodes).map(|node| format!("{job}-{node}")).collect(),
                    all_report: true,
                    name_comes_late: true,
                }))
            }
        }
    }
}

/// The name of the job, and the domain of its pods. A pod of an indexed job has the name JOB-INDEX,
/// and the kubelet writes its long name into the pod's /etc/hosts where the pod has a subdomain.
fn service(index: u32, host: &str, names: &str) -> Option<(String, String)> {
    let job = host.strip_suffix(&format!("-{index}"))?;
    let long = names.lines().flat_map(|line| line.split('#').next().unwrap_or_default().split_whitespace().skip(1));
    let domain = long.filter_map(|name| name.strip_prefix(host)?.strip_prefix('.')).next()?;
    Some((job.to_owned(), domain.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &str) -> Option<Launcher> {
        let value = |wanted: &str| {
            let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|(name, _)| *name == wanted).map(|(_, value)| value.to_owned())
        };
        Launcher::find(&value)
    }

    const SCRIPT: &str = "SLURM_JOB_ID=5 SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NODEID=0";

    #[test]
    fn slurms_steps_and_scripts_are_told_apart() {
        let step = format!(
            "{SCRIPT} SLURM_STEP_ID=3 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2"
        );
        assert!(matches!(find(&step), Some(Launcher::Step { nodes: 2, node: 0, tasks: 2, .. })));
        // The shell of salloc may be a step too.
        let shell = step.replace("STEP_ID=3", "STEP_ID=4294967290");
        assert!(matches!(find(&shell), Some(Launcher::Allocation { nodes: 2, .. })));
        assert!(find(&format!("{step} RANK=0 TORCHELASTIC_RUN_ID=x")).is_none());
        let script = find(SCRIPT).unwrap();
        assert_eq!(script.job_name().as_deref(), Some("Slurm job 5"));
        assert!(script.place(None).err().unwrap().contains("srun --ntasks-per-node 1"));
        assert!(script.place(Some(2)).unwrap().is_none());
        assert!(find(&SCRIPT.replace("NODES=2", "NODES=1")).unwrap().place(None).unwrap().is_none());
        let crowded = find(&step.replace("NUM_TASKS=2", "NUM_TASKS=8")).unwrap();
        assert!(crowded.place(None).err().unwrap().contains("8 tasks on 2 nodes"));
        let on_one =
            |tasks: &str| find(&step.replace("NODES=2", "NODES=1").replace("TASKS=2", tasks)).unwrap().place(None);
        assert!(on_one("TASKS=1").unwrap().is_none());
        assert!(on_one("TASKS=8").err().unwrap().contains("8 tasks on 1 node,"));
        assert!(find(&step).unwrap().place(Some(3)).err().unwrap().contains("--nnodes 3, and this Slurm step has 2"));
    }

    #[test]
    fn a_pod_finds_pod_0_by_its_own_name() {
        let pod = |names: &str| Launcher::Kubernetes { index: 3, host: "train-3".to_owned(), names: names.to_owned() };
        let names = "127.0.0.1 localhost\n10.1.2.3\ttrain-3.svc.ns.svc.cluster.local\ttrain-3\n";
        let place = pod(names).place(Some(4)).unwrap().unwrap();
        assert_eq!((place.host.as_str(), place.port), ("train-0.svc.ns.svc.cluster.local", KUBERNETES_PORT));
        assert_eq!((place.node, place.nodes, place.id.as_str()), (3, 4, "kubernetes-train"));
        assert!(pod("10.1.2.3 train-3\n").place(Some(4)).err().unwrap().contains("subdomain"));
        assert!(pod(names).place(None).err().unwrap().contains("--nnodes N"));
        assert!(matches!(find("JOB_COMPLETION_INDEX=3"), Some(Launcher::Kubernetes { index: 3, .. })));
    }
}
