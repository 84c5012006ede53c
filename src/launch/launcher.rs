//! Whether a launcher has started this process as one of several.

use std::env;

use super::Refusal;

/// Why a process does not stand alone, though nobody says how many there are.
const SIZE_UNTOLD: &str = "PMIX_RANK is set, so a launcher has started this process, but no variable says how many it has \
                           started: start it by mpirun or srun, or unset PMIX_RANK";

/// What a launcher says in the environment of the processes it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// What the user has typed.
    pub by: &'static str,
    pub rank: usize,
    pub size: usize,
}

/// A launcher, and the variables in which it says how many processes there are and which this is: Open MPI's, those of
/// MPICH, Intel MPI and Slurm's PMI-2, and Slurm's for every step.
const LAUNCHERS: [(&str, &str, &str); 3] = [
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
];

impl Launched {
    /// Of this process; `None` where it stands alone.
    pub fn here() -> Option<Launched> {
        Launched::among(|name| env::var(name).ok())
    }

    fn among(value: impl Fn(&str) -> Option<String>) -> Option<Launched> {
        let number = |name: &str| value(name)?.parse().ok();
        let of = |&(by, size, rank): &(&'static str, &str, &str)| {
            Some(Launched { by, size: number(size)?, rank: number(rank)? })
        };
        LAUNCHERS.iter().find_map(of).filter(|launched| launched.size > 1)
    }

    /// The same, where it must be certain.
    ///
    /// # Errors
    /// A launcher that does not say how many there are: PMIx tells that to its library only.
    pub fn for_certain() -> Result<Option<Launched>, Refusal> {
        if Launched::lacks_size(|name| env::var(name).ok()) {
            return Err(Refusal { is_request: true, text: SIZE_UNTOLD.to_owned() });
        }
        Ok(Launched::here())
    }

    fn lacks_size(value: impl Fn(&str) -> Option<String>) -> bool {
        value("PMIX_RANK").is_some() && LAUNCHERS.iter().all(|(_, size, _)| value(size).is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_known_by_their_variables() {
        let among = |set: &[(&str, &str)]| {
            Launched::among(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        let of = |by, rank, size| Some(Launched { by, rank, size });
        assert_eq!(among(&[]), None);
        assert_eq!(among(&[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3")]), of("mpirun", 3, 4));
        assert_eq!(among(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), of("mpirun", 0, 2));
        assert_eq!(among(&[("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "5")]), of("srun", 5, 8));
        // A batch script is no task of a step, and one process is as good as none.
        assert_eq!(among(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), None);
        assert_eq!(among(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")]), None);
        assert_eq!(among(&[("PMI_SIZE", "two"), ("PMI_RANK", "0")]), None);
        let lacks = |set: &[&str]| Launched::lacks_size(|name| set.contains(&name).then(|| "1".to_owned()));
        assert!(lacks(&["PMIX_RANK", "PMIX_NAMESPACE"]));
        assert!(!lacks(&["PMIX_RANK", "OMPI_COMM_WORLD_SIZE"]) && !lacks(&["PMIX_NAMESPACE"]));
    }
}
