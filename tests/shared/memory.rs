//! Bits that change in the memory of a process that trains.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::Command;

use crate::program::{RECIPE, Workshop, send_signal, wait_until};

/// A run that compares its copies after every step.
pub(crate) const COMPARED: &str = "--set train.check_replicas_every=1 --set train.steps=20000 --set train.eval_every=0 \
                                   --set train.checkpoint_every=0";
/// A weight that keeps its first values.
pub(crate) const KEPT: &str = "model.embed_tokens.weight";

/// Has the recipe keep that weight; its values as they lie in the memory of each rank.
pub(crate) fn kept_values(shop: &Workshop) -> Vec<u8> {
    shop.write(RECIPE, &shop.read(RECIPE).replace("[train]", "[train]\nfreeze = [\"embedding\"]"));
    shop.train(&format!("{COMPARED} --ranks 2 --set train.steps=1 --set run.dir=first"));
    let file = fs::read(shop.checkpoint("first", 1).join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let said: serde_json::Value = serde_json::from_slice(&file[8..header]).unwrap();
    let [from, to] = [0, 1].map(|end| said[KEPT]["data_offsets"][end].as_u64().unwrap() as usize);
    file[header..][from..to].to_vec()
}

const WINDOW: usize = 1 << 20;

/// Changes the number `values` begins with, wherever it is in a process's memory, to something else in each place; how many
/// places there are. The process stands still meanwhile, else it may find the first change and end before the second.
pub(crate) fn flip_in_memory(pid: &str, values: &[u8]) -> usize {
    struct Stopped<'a>(&'a str);
    impl Drop for Stopped<'_> {
        fn drop(&mut self) {
            // A panic here would hide the one that it may follow.
            let _ = Command::new("kill").args(["-s", "CONT", self.0]).status();
        }
    }
    send_signal("STOP", pid);
    let _stopped = Stopped(pid);
    wait_until("all threads to stand still", || {
        let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.all(|thread| {
            fs::read_to_string(thread.unwrap().path().join("stat")).is_ok_and(|stat| stat.contains(") T "))
        })
    });
    flip_still(pid, values)
}

fn flip_still(pid: &str, values: &[u8]) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let mut places = 0u8;
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (from, to) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut bytes = vec![0; WINDOW + values.len()];
        for begin in (from..to).step_by(WINDOW) {
            // Some of it cannot be read, and has nothing to find.
            let wanted = ((to - begin) as usize).min(bytes.len());
            let read = memory.read_at(&mut bytes[..wanted], begin).unwrap_or(0);
            for at in (0..WINDOW.min((read + 1).saturating_sub(values.len()))).step_by(4) {
                let is_found = bytes[at..read].starts_with(values);
                if is_found && memory.write_all_at(&[values[0] ^ (places + 1)], begin + at as u64).is_ok() {
                    places += 1;
                }
            }
        }
    }
    usize::from(places)
}
