//! Concurrent processes on one folder: this program starts itself again with a task.

use crate::{Fake, files, kernel, machine_code, open};
use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tilewright_cuda::cache::{Cache, Settings};

const TASK: &str = "KERNEL_CACHE_TASK";
const FOLDER: &str = "KERNEL_CACHE_FOLDER";
/// Number of kernels that each process requests.
const KERNELS: usize = 12;

/// The body of the child processes; does nothing in the parent.
#[test]
fn task() {
    let (Ok(task), Ok(folder)) = (std::env::var(TASK), std::env::var(FOLDER)) else { return };
    let folder = Path::new(&folder);
    let right = |cache: &Cache, number| {
        let code = cache.code(&kernel(number), &Fake::new("fake 1")).unwrap();
        assert!(code.cubin == machine_code("fake 1", &kernel(number)), "kernel {number} is wrong");
    };
    let all = |cache: &Cache, first| (0..KERNELS).for_each(|at| right(cache, (first + at) % KERNELS));
    match task.as_str() {
        "once" => {
            while !folder.join("go").exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            all(&open(&folder.join("kernels")), std::process::id() as usize);
        }
        // capacity for half of the kernels, so that each pass writes and evicts
        "for ever" => loop {
            let cache = Cache::open(Settings::in_folder(folder).limit(KERNELS as u64 * 100_000)).unwrap();
            all(&cache, std::process::id() as usize);
        },
        "full disk" => {
            let cache = Cache::open(Settings::in_folder(folder)).unwrap();
            all(&cache, 0);
        }
        other => panic!("no task {other}"),
    }
}

fn start(task: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    set_task(&mut command, task, folder);
    command
}

fn set_task(command: &mut Command, task: &str, folder: &Path) {
    command.args(["--exact", "processes::task", "--nocapture", "--test-threads=1"]);
    command.env(TASK, task).env(FOLDER, folder).stdout(Stdio::null()).stderr(Stdio::piped());
}

/// Asserts that a process succeeded, and returns its standard error.
#[track_caller]
fn succeeded(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{} {said}", output.status);
    said
}

#[test]
fn sixty_four_processes_start_at_once_on_an_empty_cache() {
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..64).map(|_| start("once", folder.path()).spawn().unwrap()).collect();
    std::fs::write(folder.path().join("go"), "").unwrap();
    children.into_iter().for_each(|child| assert_eq!(succeeded(child), ""));
    assert_eq!(files(&folder.path().join("kernels")).len(), KERNELS, "entries, and nothing else");
    succeeded(start("once", folder.path()).spawn().unwrap());
    let cache = open(&folder.path().join("kernels"));
    (0..KERNELS).for_each(|number| drop(cache.code(&kernel(number), &Fake::new("fake 1")).unwrap()));
    assert_eq!((cache.counts().cached, cache.counts().invalid), (KERNELS, 0));
}

#[test]
fn two_hundred_kills_leave_no_invalid_entry() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 12345_u32;
    let mut written = 0;
    for _ in 0..20 {
        let mut children: Vec<Child> =
            (0..10).map(|_| start("for ever", folder.path()).spawn().unwrap()).collect();
        let begun = Instant::now();
        for (at, child) in children.iter_mut().enumerate() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let moment = Duration::from_micros(20_000 + 8_000 * at as u64 + u64::from(state >> 19));
            std::thread::sleep(moment.saturating_sub(begun.elapsed()));
            child.kill().unwrap();
        }
        for child in children {
            let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
            assert_eq!(said, "", "killed while everything was well");
        }
        written += files(folder.path()).len();
    }
    assert!(written > 100, "the processes were killed before they did anything: {written} files");
    let cache = open(folder.path());
    for number in 0..KERNELS {
        let code = cache.code(&kernel(number), &Fake::new("fake 1")).unwrap();
        assert_eq!(code.cubin, machine_code("fake 1", &kernel(number)));
    }
    assert_eq!(cache.counts().invalid, 0, "no entry is half an entry");
}

#[cfg(unix)]
#[test]
fn a_full_disk_warns_once_and_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    // a file limit of 40 blocks of 512 bytes acts like a full disk
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 40; exec \"$0\" \"$@\""]);
    shell.arg(std::env::current_exe().unwrap());
    set_task(&mut shell, "full disk", folder.path());
    let said = succeeded(shell.spawn().unwrap());
    let begin = format!("tilewright: kernel cache: {}: File too large", folder.path().display());
    assert!(said.starts_with(&begin), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(files(folder.path()).len(), 0);
    succeeded(start("full disk", folder.path()).spawn().unwrap());
    assert_eq!(files(folder.path()).len(), KERNELS, "there is room again");
}
