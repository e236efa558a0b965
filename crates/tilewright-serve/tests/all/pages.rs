//! The page allocator: allocation order, error texts, and 100,000 random operations compared with a set.

use std::collections::BTreeSet;

use crate::generator::Generator;
use tilewright_serve::pages::{PageAllocator, PageId};

fn error_of_free(allocator: &mut PageAllocator, pages: &[PageId]) -> String {
    let before = allocator.clone();
    let error = allocator.free(pages).unwrap_err();
    assert_eq!(format!("{before:?}"), format!("{allocator:?}"), "a failed free changed the allocator");
    error.to_string()
}

#[test]
fn a_pool_has_at_least_one_page_and_i32_indices() {
    let text = |num_pages| PageAllocator::new(num_pages).unwrap_err().to_string();
    assert_eq!(text(0), "pages.new: num_pages = 0 is not in 1..=2147483647");
    assert_eq!(text(1 << 31), "pages.new: num_pages = 2147483648 is not in 1..=2147483647");
    assert_eq!(PageAllocator::new(1).unwrap().allocate(1), Some(vec![0]));
}

#[test]
fn allocation_is_all_or_nothing() {
    let mut allocator = PageAllocator::new(5).unwrap();
    assert_eq!(allocator.allocate(2), Some(vec![0, 1]));
    assert_eq!(allocator.allocate(4), None);
    assert_eq!(allocator.allocate(usize::MAX), None);
    assert_eq!((allocator.num_free(), allocator.num_used(), allocator.num_pages()), (3, 2, 5));
    assert_eq!(allocator.allocate(0), Some(vec![]));
    assert_eq!(allocator.allocate(3), Some(vec![2, 3, 4]));
    assert_eq!(allocator.allocate(0), Some(vec![]));
    assert_eq!(allocator.allocate(1), None);
    allocator.check_integrity().unwrap();
}

#[test]
fn the_page_freed_last_is_allocated_first() {
    let mut allocator = PageAllocator::new(5).unwrap();
    assert_eq!(allocator.allocate(5), Some(vec![0, 1, 2, 3, 4]));
    allocator.free(&[3]).unwrap();
    allocator.free(&[4, 1]).unwrap();
    assert_eq!(allocator.allocate(3), Some(vec![4, 1, 3]));
}

#[test]
fn an_invalid_free_is_rejected_and_changes_nothing() {
    let mut allocator = PageAllocator::new(4).unwrap();
    assert_eq!(allocator.allocate(3), Some(vec![0, 1, 2]));
    assert_eq!(error_of_free(&mut allocator, &[0, 3]), "pages.free: pages[1] = 3 is free already");
    assert_eq!(error_of_free(&mut allocator, &[0, 1, 0]), "pages.free: pages[2] = 0 is given twice");
    assert_eq!(error_of_free(&mut allocator, &[2, 4]), "pages.free: pages[1] = 4 is not in 0..4");
    assert_eq!(error_of_free(&mut allocator, &[-1]), "pages.free: pages[0] = -1 is not in 0..4");
    allocator.free(&[0, 1, 2]).unwrap();
    assert_eq!(allocator.num_free(), 4);
}

/// Removes a random half of `used` and returns it, shuffled.
fn remove_random_half(generator: &mut Generator, used: &mut BTreeSet<PageId>) -> Vec<PageId> {
    let mut pages: Vec<PageId> = used.iter().copied().filter(|_| generator.below(2) == 0).collect();
    for i in (1..pages.len()).rev() {
        pages.swap(i, generator.below(i + 1));
    }
    used.retain(|page| !pages.contains(page));
    pages
}

#[test]
fn the_allocator_survives_100_000_random_operations() {
    const NUM_PAGES: usize = 61;
    let mut generator = Generator::new(7);
    let mut allocator = PageAllocator::new(NUM_PAGES).unwrap();
    let mut used = BTreeSet::new();
    let mut rejected = [0; 2];
    for _ in 0..100_000 {
        match generator.below(4) {
            0 | 1 => {
                let count = generator.below(NUM_PAGES / 3);
                let pages = allocator.allocate(count);
                assert_eq!(pages.is_some(), count <= NUM_PAGES - used.len());
                rejected[0] += usize::from(pages.is_none());
                let pages = pages.unwrap_or_default();
                assert!(pages.is_empty() || pages.len() == count);
                assert!(pages.iter().all(|&page| (0..NUM_PAGES as i32).contains(&page) && used.insert(page)));
            }
            2 => allocator.free(&remove_random_half(&mut generator, &mut used)).unwrap(),
            _ => {
                // An id in -1..=num_pages, after valid pages.
                let wrong = generator.below(NUM_PAGES + 2) as i32 - 1;
                if !used.contains(&wrong) {
                    let mut pages = remove_random_half(&mut generator, &mut used.clone());
                    pages.push(wrong);
                    error_of_free(&mut allocator, &pages);
                    rejected[1] += 1;
                }
            }
        }
        allocator.check_integrity().unwrap();
        assert_eq!((allocator.num_used(), allocator.num_free()), (used.len(), NUM_PAGES - used.len()));
    }
    assert!(rejected.iter().all(|&count| count > 5_000), "too few of one kind to mean much: {rejected:?}");
}
