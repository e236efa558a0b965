//! The page allocator: the free list of the KV pool.
//!
//! Invariant: the free list holds every free page once and no used page. A used page has exactly one owner: a
//! running request or the [radix tree](crate::radix). Pages have no reference counts; locks in the tree implement
//! sharing.

use tilewright::{Error, Result, ensure};

/// Index of a page in the KV pool, as stored in the page tables of kernels.
pub type PageId = i32;

/// The free pages of a KV pool of fixed size.
///
/// ```
/// # use tilewright_serve::pages::PageAllocator;
/// let mut allocator = PageAllocator::new(8)?;
/// let pages = allocator.allocate(3).expect("8 pages are free");
/// assert_eq!(allocator.num_free(), 5);
/// assert_eq!(allocator.allocate(6), None); // all or nothing
/// allocator.free(&pages)?;
/// # Ok::<(), tilewright::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PageAllocator {
    /// A stack: the page freed last is allocated first, because it may still be in the CPU cache.
    free_list: Vec<PageId>,
    /// `[num_pages]`
    states: Vec<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Used,
}

impl PageAllocator {
    /// A pool of `num_pages` pages, all free; the first allocation gets page 0.
    ///
    /// # Errors
    /// Unless `num_pages` is in `1..=i32::MAX`.
    pub fn new(num_pages: usize) -> Result<Self> {
        let end = PageId::try_from(num_pages).ok().filter(|&end| end > 0);
        let end = end.ok_or_else(|| {
            Error::new("pages.new", format!("num_pages = {num_pages} is not in 1..={}", PageId::MAX))
        })?;
        Ok(Self { free_list: (0..end).rev().collect(), states: vec![State::Free; num_pages] })
    }

    /// Allocates `count` pages, which the caller then owns; `None` when fewer are free.
    #[must_use = "dropped pages are lost to the pool"]
    pub fn allocate(&mut self, count: usize) -> Option<Vec<PageId>> {
        let kept = self.free_list.len().checked_sub(count)?;
        let pages: Vec<PageId> = self.free_list.drain(kept..).rev().collect();
        for &page in &pages {
            self.states[page as usize] = State::Used;
        }
        Some(pages)
    }

    /// Frees `pages`, in any order.
    ///
    /// # Errors
    /// When a page is unknown, free already, or passed twice; nothing is freed then.
    pub fn free(&mut self, pages: &[PageId]) -> Result<()> {
        for (i, &page) in pages.iter().enumerate() {
            if let Err(error) = self.release(page) {
                for &released in &pages[..i] {
                    self.states[released as usize] = State::Used;
                }
                let twice = pages[..i].contains(&page);
                return Err(if twice {
                    Error::new("pages.free", format!("pages[{i}] = {page} is given twice"))
                } else {
                    Error::new("pages.free", format!("pages[{i}] = {page} {error}"))
                });
            }
        }
        self.free_list.extend(pages.iter().rev());
        Ok(())
    }

    /// Marks one page free, or returns the reason why it cannot be freed.
    fn release(&mut self, page: PageId) -> Result<(), String> {
        let num_pages = self.num_pages();
        let state = usize::try_from(page).ok().and_then(|at| self.states.get_mut(at));
        match state {
            None => Err(format!("is not in 0..{num_pages}")),
            Some(State::Free) => Err("is free already".to_owned()),
            Some(state) => {
                *state = State::Free;
                Ok(())
            }
        }
    }

    /// The number of free pages.
    pub fn num_free(&self) -> usize {
        self.free_list.len()
    }

    /// The number of pages that have an owner.
    pub fn num_used(&self) -> usize {
        self.num_pages() - self.num_free()
    }

    /// The number of pages of the pool.
    pub fn num_pages(&self) -> usize {
        self.states.len()
    }

    /// Checks the module's invariant, in time linear in the pool.
    ///
    /// # Errors
    /// With the first page that violates it.
    pub fn check_integrity(&self) -> Result<()> {
        const OPERATOR: &str = "pages.check_integrity";
        let mut listed = vec![false; self.num_pages()];
        for &page in &self.free_list {
            let at = usize::try_from(page).unwrap_or(usize::MAX);
            ensure!(at < self.num_pages(), OPERATOR, "the free list holds the unknown page {page}");
            ensure!(self.states[at] == State::Free, OPERATOR, "the free list holds the used page {page}");
            ensure!(!listed[at], OPERATOR, "the free list holds page {page} twice");
            listed[at] = true;
        }
        let lost = (0..self.num_pages()).find(|&at| self.states[at] == State::Free && !listed[at]);
        ensure!(lost.is_none(), OPERATOR, "free page {} is not in the free list", lost.unwrap_or_default());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_after(damage: impl Fn(&mut PageAllocator)) -> String {
        let mut allocator = PageAllocator::new(4).unwrap();
        assert_eq!(allocator.allocate(2), Some(vec![0, 1]));
        allocator.check_integrity().unwrap();
        damage(&mut allocator);
        allocator.check_integrity().unwrap_err().message().to_owned()
    }

    #[test]
    fn check_integrity_finds_every_damage() {
        assert_eq!(error_after(|a| a.free_list.push(4)), "the free list holds the unknown page 4");
        assert_eq!(error_after(|a| a.free_list.push(-1)), "the free list holds the unknown page -1");
        assert_eq!(error_after(|a| a.free_list.push(1)), "the free list holds the used page 1");
        assert_eq!(error_after(|a| a.free_list.push(2)), "the free list holds page 2 twice");
        assert_eq!(error_after(|a| a.states[1] = State::Free), "free page 1 is not in the free list");
    }
}
