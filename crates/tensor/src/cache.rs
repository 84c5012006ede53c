//! Where is kept what is worth making or measuring once.

use std::path::PathBuf;

/// A folder of this user's, for all programs of this name; nothing if nobody says where the user's home is. All that is in it
/// may be deleted at any time.
pub fn cache_folder() -> Option<PathBuf> {
    std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache/guildhall"))
}
