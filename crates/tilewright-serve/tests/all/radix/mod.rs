//! The radix tree: `random` compares its behavior with a naive model; here are errors, stale ids and `Display`.

use tilewright_serve::{
    pages::PageId,
    radix::{NodeId, RadixTree},
};

mod model;
mod random;

const NO_PAGES: [PageId; 0] = [];

/// A tree with pages of two tokens and every path of `content`, inserted in order.
fn tree(content: &[(&[u32], &[PageId])]) -> RadixTree {
    let mut tree = RadixTree::new(2).unwrap();
    for (tokens, pages) in content {
        insert(&mut tree, tokens, pages);
    }
    tree
}

fn insert(tree: &mut RadixTree, tokens: &[u32], pages: &[PageId]) -> NodeId {
    let insertion = tree.insert(tokens, pages).unwrap();
    assert_eq!(insertion.duplicates, NO_PAGES);
    tree.check_integrity().unwrap();
    insertion.node
}

fn error_of_insert(tree: &mut RadixTree, tokens: &[u32], pages: &[PageId]) -> String {
    let before = tree.to_string();
    let error = tree.insert(tokens, pages).unwrap_err();
    assert_eq!(tree.to_string(), before, "a failed insertion changed the tree");
    error.to_string()
}

#[test]
fn a_page_has_at_least_one_token() {
    let error = RadixTree::new(0).unwrap_err();
    assert_eq!(error.to_string(), "radix.new: page_size = 0 is not at least 1");
}

#[test]
fn an_invalid_insertion_is_rejected_and_changes_nothing() {
    let mut tree = tree(&[(&[1, 1, 2, 2], &[0, 1])]);
    let text = "radix.insert: tokens.len() = 3 does not fill pages.len() = 2 of 2 tokens each";
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 2], &[0, 1]), text);
    let text = "radix.insert: tokens.len() = 2 does not fill pages.len() = 2 of 2 tokens each";
    assert_eq!(error_of_insert(&mut tree, &[1, 1], &[0, 1]), text);
    let text = "radix.insert: pages[1] = 5 is given twice";
    assert_eq!(error_of_insert(&mut tree, &[8, 8, 9, 9], &[5, 5]), text);
    let text = "radix.insert: pages[0] = -1 is negative";
    assert_eq!(error_of_insert(&mut tree, &[8, 8], &[-1]), text);
    let text = "radix.insert: pages[1] = 1 is in the tree already, for other tokens";
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 3, 3], &[0, 1]), text);
    let text = "radix.insert: pages[0] = 1 is in the tree already, for other tokens";
    assert_eq!(error_of_insert(&mut tree, &[1, 1], &[1]), text);
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 2, 2], &[1, 0]), text);
    let text = "radix.insert: pages[2] = 0 is in the tree already, for other tokens";
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 2, 2, 3, 3], &[0, 1, 0]), text);
}

#[test]
fn a_stale_id_is_rejected_even_after_reinsertion() {
    let mut tree = tree(&[]);
    let old = insert(&mut tree, &[1, 1, 2, 2], &[0, 1]);
    assert_eq!(tree.evict(1), [1]);
    let text = "radix.lock: node 1 is not, or no longer, in the tree";
    assert_eq!(tree.lock(old).unwrap_err().to_string(), text);
    let new = insert(&mut tree, &[1, 1, 2, 2], &[0, 5]);
    assert_ne!(new, old);
    assert_eq!(tree.lock(old).unwrap_err().to_string(), text);
    let text = "radix.unlock: node 1 is not, or no longer, in the tree";
    assert_eq!(tree.unlock(old).unwrap_err().to_string(), text);
    tree.lock(new).unwrap();
}

#[test]
fn an_id_of_another_tree_is_rejected() {
    let mut other = tree(&[(&[1, 1], &[0]), (&[2, 2], &[1])]);
    let foreign = other.match_prefix(&[2, 2]).node;
    let text = "radix.lock: node 2 is not, or no longer, in the tree";
    assert_eq!(tree(&[]).lock(foreign).unwrap_err().to_string(), text);
}

#[test]
fn display_sorts_siblings_and_truncates_long_lists() {
    let mut tree = tree(&[(&[5, 6], &[9]), (&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[0, 1, 2, 3, 4])]);
    tree.match_prefix(&[1, 2]);
    let expected = "\
root: 6 pages of 2 tokens, 6 evictable, locks 0 of 0, used at 3
├── node 3: tokens [1 2], pages [0], locks 0 of 0, used at 3
│   └── node 2: tokens [3 4 5 6 7 8 9 10], pages [1 2 3 4], locks 0 of 0, used at 2
└── node 1: tokens [5 6], pages [9], locks 0 of 0, used at 1
";
    assert_eq!(tree.to_string(), expected);
    let pages: Vec<PageId> = (10..15).collect();
    let drawn = self::tree(&[(&[1; 10], &pages)]).to_string();
    assert!(drawn.contains("tokens [1 1 1 1 1 1 1 1 … 2 more]"), "{drawn}");
}
