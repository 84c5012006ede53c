//! A disk that stops answering, as a network file system does whose server is gone, or that is slow: for the calls of one
//! name of threads of one name. A library that is loaded before the C library does this, so that it needs neither root nor
//! such a file system.

use std::fs::{self, File, OpenOptions};
use std::path::PathBuf;
use std::process::Command;

use crate::program::Workshop;

/// Who opens a pipe that nobody writes into is blocked, as by a disk.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

static void meet(const char *call) {
    char thread[16], file[80];
    prctl(PR_GET_NAME, thread);
    snprintf(file, sizeof file, "lags.%s.%s", thread, call);
    FILE *lag = fopen(file, "r");
    int ms = 0;
    if (lag && fscanf(lag, "%d", &ms) == 1)
        usleep(1000 * ms);
    if (lag)
        fclose(lag);
    snprintf(file, sizeof file, "hangs.%s.%s", thread, call);
    int pipe = open(file, O_RDONLY);
    if (pipe >= 0)
        close(pipe);
}

#define NEXT(name, ...) (meet(#name), (__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)

int fsync(int file) { return NEXT(fsync, file); }
// Absolute are the paths of folders that a launcher's library makes.
int mkdir(const char *path, mode_t mode) {
    if (*path == '/')
        return ((__typeof__(&mkdir))dlsym(RTLD_NEXT, "mkdir"))(path, mode);
    return NEXT(mkdir, path, mode);
}
int rename(const char *from, const char *to) { return NEXT(rename, from, to); }
ssize_t pread64(int file, void *to, size_t len, off64_t at) { return NEXT(pread64, file, to, len, at); }
"#;

/// The disk of a workshop.
pub(crate) struct Disk<'a> {
    shop: &'a Workshop,
    library: PathBuf,
}

impl<'a> Disk<'a> {
    pub(crate) fn new(shop: &'a Workshop) -> Disk<'a> {
        shop.write("disk.c", LIBRARY);
        let library = shop.path("disk.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(shop.path("disk.c")).arg("-ldl");
        assert!(compiler.status().unwrap().success());
        Disk { shop, library }
    }

    /// What a shell sets for a program that is to have this disk.
    pub(crate) fn setting(&self) -> String {
        format!("LD_PRELOAD={}", self.library.display())
    }

    /// From now on these calls of this thread take so many milliseconds more.
    pub(crate) fn lags(&self, thread: &str, call: &str, ms: u64) {
        self.shop.write(&format!("lags.{thread}.{call}"), &ms.to_string());
    }

    /// From now on none of these calls of this thread returns.
    pub(crate) fn hangs(&self, thread: &str, call: &str) -> Hanging {
        let pipe = self.shop.path(&format!("hangs.{thread}.{call}"));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        Hanging { pipe }
    }
}

/// Calls that do not return.
pub(crate) struct Hanging {
    pipe: PathBuf,
}

impl Hanging {
    /// They return, as long as what is returned lives.
    pub(crate) fn end(self) -> File {
        let writer = OpenOptions::new().read(true).write(true).open(&self.pipe).unwrap();
        fs::remove_file(&self.pipe).unwrap();
        writer
    }
}
