//! Cache lookups: the source of the code, and the error if there is none.

use crate::{Fake, Refusal, files, kernel, machine_code, open, quiet};
use tilewright_cuda::cache::{Cache, Code, Counts, Settings, Source};

#[test]
fn a_kernel_is_assembled_once_for_all_processes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("not/there/yet");
    let fake = Fake::new("fake 1");
    for run in 0..3 {
        let cache = open(&path);
        let code = cache.code(&kernel(1), &fake).unwrap();
        assert_eq!(code.cubin, machine_code("fake 1", &kernel(1)));
        assert_eq!((code.kernel.as_str(), code.target.as_str()), ("kernel_1", "sm_90a"));
        assert_eq!(cache.counts().cached, usize::from(run > 0));
    }
    assert_eq!(fake.calls(), 1);
    assert_eq!(files(&path).len(), 1);
}

#[test]
fn another_text_target_or_assembler_is_another_kernel() {
    let folder = tempfile::tempdir().unwrap();
    let (fake, newer) = (Fake::new("fake 1"), Fake::new("fake 2"));
    let source = kernel(1);
    open(folder.path()).code(&source, &fake).unwrap();
    let cache = open(folder.path());
    let other = Source::new(source.name(), "sm_90a", source.ptx().replace("add", "sub"));
    let elsewhere = Source::new(source.name(), "sm_100", source.ptx());
    for (source, fake) in [(&other, &fake), (&elsewhere, &fake), (&source, &newer)] {
        let right = machine_code(tilewright_cuda::cache::Assembler::identity(fake), source);
        assert_eq!(cache.code(source, fake).unwrap().cubin, right);
    }
    assert_eq!(cache.counts(), Counts { assembled: 3, ..Counts::default() });
}

#[test]
fn errors_of_the_assembler_are_complete_and_not_cached() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new("fake 1");
    let cache = open(folder.path());
    let source = Source::new("wrong", "sm_90a", "mistake");
    for calls in 1..=2 {
        let why = cache.code(&source, &fake).unwrap_err().to_string();
        assert_eq!(
            why,
            "kernel wrong for sm_90a: the assembler refused it: line 3: no such instruction\nline 4: nor this"
        );
        assert_eq!(fake.calls(), calls, "another attempt is made");
    }
    assert_eq!(files(folder.path()).len(), 0);
}

#[test]
fn read_only_and_off_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new("fake 1");
    open(folder.path()).code(&kernel(1), &fake).unwrap();
    let before = files(folder.path());
    let damaged = folder.path().join(&before[0]);

    let reads = Cache::open(quiet(folder.path()).read_only()).unwrap();
    reads.code(&kernel(1), &fake).unwrap();
    assert_eq!(reads.code(&kernel(2), &fake).unwrap().cubin, machine_code("fake 1", &kernel(2)));
    assert_eq!(reads.counts(), Counts { cached: 1, assembled: 1, ..Counts::default() });
    assert_eq!(files(folder.path()), before);
    std::fs::write(&damaged, "nothing").unwrap();
    let reads = Cache::open(quiet(folder.path()).read_only()).unwrap();
    assert_eq!(reads.code(&kernel(1), &fake).unwrap().cubin, machine_code("fake 1", &kernel(1)));
    assert_eq!(std::fs::read(&damaged).unwrap(), b"nothing", "damaged entries are not removed either");

    let off = Cache::open(Settings::off()).unwrap();
    assert_eq!(off.code(&kernel(1), &fake).unwrap().cubin, machine_code("fake 1", &kernel(1)));
    assert_eq!((off.list().unwrap().len(), off.clear().unwrap()), (0, (0, 0)));
}

#[test]
fn missing_kernels_are_named_if_assembling_is_disabled() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new("fake 1");
    open(folder.path()).code(&kernel(1), &fake).unwrap();
    let cache = Cache::open(quiet(folder.path()).refuse_to_assemble()).unwrap();
    let kernels = [kernel(1), kernel(2).configured("causal, head_dim 128"), kernel(3)];
    let why = cache.all(&kernels, &fake, &|_| {}).unwrap_err();
    let place = folder.path().display();
    assert_eq!(
        why.to_string(),
        format!(
            "2 kernels would have to be assembled, which is not allowed here:\n  \
             kernel_2 for sm_90a (causal, head_dim 128): not in {place}\n  kernel_3 for sm_90a: not in {place}"
        )
    );
    assert_eq!(fake.calls(), 1);
    let uncached = Cache::open(Settings::off().refuse_to_assemble()).unwrap();
    let why = uncached.code(&kernel(1), &fake).unwrap_err().to_string();
    assert!(why.ends_with("kernel_1 for sm_90a: no bundle and no cache to look in"), "{why}");
}

#[test]
fn code_that_the_device_rejects_is_assembled_again() {
    let folder = tempfile::tempdir().unwrap();
    let fake = Fake::new("fake 1");
    open(folder.path()).code(&kernel(1), &fake).unwrap();
    let cache = open(folder.path());
    let refused = std::sync::atomic::AtomicUsize::new(0);
    let fails_once = |code: &Code| {
        let first = refused.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        if first { Err(Refusal("too new for this driver".to_owned())) } else { Ok(code.cubin.len()) }
    };
    assert_eq!(cache.load(&kernel(1), &fake, fails_once, |_| true), Ok(200_000));
    assert_eq!(cache.counts(), Counts { cached: 1, assembled: 1, invalid: 1, ..Counts::default() });
    assert_eq!((fake.calls(), files(folder.path()).len()), (2, 1));

    let no_memory = |_: &Code| Err::<(), _>(Refusal("no memory".to_owned()));
    let fresh = cache.load(&kernel(2), &fake, no_memory, |_| true);
    assert_eq!(fresh, Err(Refusal("no memory".to_owned())), "there is nothing else to try");
    let not_its_fault = open(folder.path()).load(&kernel(1), &fake, no_memory, |_| false);
    assert_eq!(not_its_fault, Err(Refusal("no memory".to_owned())));
    assert_eq!((fake.calls(), files(folder.path()).len()), (3, 2), "the entry is still there");
}

#[test]
fn entries_are_listed_and_cleared() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path());
    assert_eq!(open(&folder.path().join("none")).list().unwrap().len(), 0);
    cache.all(&[kernel(1), kernel(2)], &Fake::new("fake 1"), &|_| {}).unwrap();
    std::fs::write(folder.path().join("README"), "mine").unwrap();
    let mut listed = cache.list().unwrap();
    listed.sort_by_key(|entry| entry.code.as_ref().unwrap().kernel.clone());
    assert_eq!(listed.len(), 2);
    for (entry, number) in listed.iter().zip([1, 2]) {
        let code = entry.code.as_ref().unwrap();
        assert_eq!((&code.kernel, code.assembler.as_str()), (&format!("kernel_{number}"), "fake 1"));
        assert!(entry.bytes > 200_000 && entry.used.elapsed().unwrap().as_secs() < 60);
    }
    assert_eq!(cache.clear().unwrap().0, 2);
    assert_eq!(files(folder.path()), ["README"]);
}
