# Read by llama.cpp's build, right after its project() (CMAKE_PROJECT_llama.cpp_INCLUDE): llama-cpp-python insists on
# llama.cpp's library for programs (arguments, chats, downloads), which it neither installs nor links to.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "llama.cpp's library for programs" FORCE)
