//! A disk that is slow, for all ranks or for one: an ext4 in a file, behind a loop device, which the kernel's I/O controller
//! (cgroup v1, blkio.throttle) lets write so many bytes a second. What a process writes is slow when it flushes it, as with
//! a disk whose cache of pages is large. Only root may make one.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::program::{RECIPE, Running, Workshop, damage, wait_until};

/// A rank writes some 19 MB. An expert is larger than a file of a MiB, so that most of these files have one writer.
const LARGE: &str = "--set model.d_model=64 --set moe.d_expert=2048";
const BYTES_PER_S: u64 = 4_000_000;
/// So that a rank that is away for as long as a write takes is missed, and the disk is slow before the first checkpoint.
const OPTIONS: &str = "--ranks 2 --set parallel.expert=2 --set parallel.timeout_s=3 --set train.eval_every=0 \
                       --set train.checkpoint_every=24 --set train.steps=49 --set run.dir=disk/run";

/// Undone when dropped.
struct SlowDisk {
    mounted: PathBuf,
    device: String,
    group: PathBuf,
}

fn done(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl SlowDisk {
    fn new(shop: &Workshop) -> SlowDisk {
        let (image, mounted) = (shop.path("image"), shop.path("disk"));
        fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
        fs::create_dir(&mounted).unwrap();
        let device = done("losetup", &["--find", "--show", image.to_str().unwrap()]);
        // Without a journal: who flushes a file would have that flush what others have written, too, at its own speed.
        done("mkfs.ext4", &["-q", "-O", "^has_journal", &device]);
        done("mount", &[&device, mounted.to_str().unwrap()]);
        let group = PathBuf::from(format!("/sys/fs/cgroup/blkio/slow-{}", device.replace('/', "-")));
        fs::create_dir(&group).unwrap();
        let numbers = done("lsblk", &["-no", "MAJ:MIN", &device]);
        fs::write(group.join("blkio.throttle.write_bps_device"), format!("{numbers} {BYTES_PER_S}")).unwrap();
        SlowDisk { mounted, device, group }
    }

    /// Makes the disk slow for a rank of a process, for what writes its checkpoints, and for the threads that they start from
    /// now on.
    fn slow_down(&self, run: &Running, rank: usize) {
        let (rank, writer) = (format!("rank {rank}"), format!("checkpoint {rank}"));
        let mut slowed = BTreeSet::new();
        wait_until("the rank's thread", || {
            // Until nothing is new: what a thread that is still quick had started while the others were looked for is found too.
            let mut is_new = false;
            for thread in fs::read_dir(format!("/proc/{}/task", run.pid())).into_iter().flatten().flatten() {
                let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
                let number = thread.file_name().into_string().unwrap();
                if [rank.as_str(), &writer].contains(&name.trim()) && slowed.insert(number.clone()) {
                    // A thread that has ended meanwhile writes no more.
                    let _ = fs::write(self.group.join("tasks"), number);
                    is_new = true;
                }
            }
            !slowed.is_empty() && !is_new
        });
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mounted).status();
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
        let _ = fs::remove_dir(&self.group);
    }
}

#[test]
#[ignore = "needs root: mounts a disk and slows it down"]
fn a_slow_disk_times_no_rank_out() {
    let shop = Workshop::new();
    shop.succeeds(&format!("prepare {RECIPE}"));
    let plain = format!("train {RECIPE} {LARGE} {}", OPTIONS.replace("disk/run", "quick"));
    shop.succeeds(&plain);
    let (beside, several) = ("--set train.checkpoint_async=true", "--set train.checkpoint_file_mib=1");
    // Who flushes a file flushes what others have written to it, too: where one rank is slow, most files have one writer.
    for (slow, goes_on, manner) in [
        (&[0, 1][..], false, ""),
        (&[1], false, several),
        (&[0], false, several),
        (&[0, 1], true, beside),
        (&[1], true, &format!("{beside} {several}")),
    ] {
        let disk = SlowDisk::new(&shop);
        let run = shop.start(&format!("train {RECIPE} {LARGE} {OPTIONS} {manner}"));
        slow.iter().for_each(|&rank| disk.slow_down(&run, rank));
        let ended = run.wait();
        assert_eq!(ended.code, Some(0), "{slow:?} {manner}: {}", ended.err);
        for step in [24, 48, 49] {
            assert_eq!(damage(&shop.checkpoint("disk/run", step)), None, "{slow:?} {manner}");
        }
        let took = shop.series("disk/run", "seconds").into_iter().map(|seconds| seconds.as_f64().unwrap());
        let took: Vec<f64> = took.collect();
        // Between the lines of steps 24 and 25 a run that waits has written a checkpoint; another takes its steps meanwhile.
        let waited = took[24] - took[23];
        assert_eq!(waited < 2.5, goes_on, "{slow:?} {manner}: {waited} s");
        assert_eq!(shop.series("disk/run", "loss"), shop.series("quick", "loss"));
        drop(disk);
        ["image", "disk"].iter().for_each(|name| {
            let path = shop.path(name);
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        });
    }
}
